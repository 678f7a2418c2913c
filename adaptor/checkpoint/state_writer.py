"""Writes the files of Megatron's `save_checkpoint`, from the live objects of a rank and the record of a step.

The files are the files of data-parallel rank 0 of a model-parallel rank, in a format of the framework
(`training_state.CheckpointFormat`): the same keys, dtypes and bits. The code runs in a thread beside a main
thread that may hang in a broken collective. So it calls only local functions of the framework (`state_dict`
of a module, of an optimizer), and takes all values that the main thread changes between two updates from the
record.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from adaptor.checkpoint import in_place, in_place_holder, planned_tensors, shards
from adaptor.checkpoint.archive_layout import FileLayout
from adaptor.checkpoint.file_parts import NotFinite
from adaptor.checkpoint.format_torch import TorchFormat, can_be_planned
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.planned_tensors import CannotBePlanned, PlannedTensors, Source
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.step_record import StepRecord, chain
from adaptor.checkpoint.training_state import (
    FLOPS,
    CheckpointFormat,
    Files,
    PlannableFormat,
    TrainingState,
)
from adaptor.checkpoint.weights import Weights
from adaptor.errors import CheckpointError
from adaptor.protocol.framework_options import LEFT_OUT
from adaptor.protocol.naming import FileEntry
from adaptor.verification import given_sums
from adaptor.verification.agreed_state import AgreedGroup


@dataclass(frozen=True)
class WrittenFiles:
    """The written files; `not_finite` names the parts with a nan or an infinity, "" if none."""

    files: tuple[FileEntry, ...]
    not_finite: str


def _format(state: TrainingState) -> CheckpointFormat:
    return state.format or TorchFormat()


def send_shards(state: TrainingState, writer: int, exchange: Exchange) -> None:
    """Write the chosen shards of this rank into the files of `writer` of the exchange, or send them.

    Raises CheckpointError, DumpCancelled, RuntimeError (a peer is gone).
    """
    with torch.no_grad():
        optimizers = chain(state.optimizer)
        if not _is_in_place(state, exchange) or in_place_holder.take_part(optimizers, writer, exchange):
            shards.send_shards(optimizers, writer, exchange)


def write_files(
    state: TrainingState,
    record: StepRecord,
    exchange: Exchange,
    temporary_folder: Path,
    attempt: int,
    agreed: AgreedGroup | None = None,
) -> WrittenFiles:
    """Write the rank's files below the temporary folder, with the shards of all holders.

    If `exchange` has a folder, and all holders see it, each writes its own shards (`in_place`); otherwise the
    shards are gathered here. Each file is written and fsynced under a name that ends in the number of the
    `attempt`; its final name comes with the publish. So an abandoned attempt that still runs cannot touch the
    files of another. `agreed`: the sums of the state, from its holders; None: they have sent none.

    Raises as `send_shards`, and CheckpointError if other bits than the agreed ones were to be written, or
    what `exchange.on_not_finite` raises. Written files are removed.
    """
    with torch.no_grad():
        written = None
        if _is_in_place(state, exchange):
            written = _write_in_place(state, record, exchange, attempt)
        entries, files, not_finite = written or _gather(state, record, exchange, agreed)
        try:
            files |= _on_top(state, record, agreed)
            entries += _write_files(files, exchange, temporary_folder, attempt)
        except BaseException:
            _remove(temporary_folder / entry.draft for entry in entries)
            raise
        return WrittenFiles(_with_trackers(state, entries), not_finite)


# The entries of the files that are written, the writers of all others, and a text about non-finite parts.
_Written = tuple[list[FileEntry], Files, str]


def _write_files(
    files: Files, exchange: Exchange, temporary_folder: Path, attempt: int
) -> tuple[FileEntry, ...]:
    entries: list[FileEntry] = []
    drafts: list[Path] = []
    path = temporary_folder
    try:
        for name in list(files):
            path = temporary_folder / f"{name}.{attempt}"
            with HashingFile(path, exchange.advanced, base_folder=temporary_folder) as file:
                drafts.append(path)
                files.pop(name)(file)
            entries.append(file.entry(name, attempt))
    except BaseException as error:
        _remove(drafts)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        raise
    return tuple(entries)


def _remove(drafts: Iterable[Path]) -> None:
    for draft in drafts:
        with contextlib.suppress(OSError):
            draft.unlink()


def _is_in_place(state: TrainingState, exchange: Exchange) -> bool:
    """Return True if the holders write their shards themselves: equal on all ranks of an exchange."""
    return exchange.folder is not None and _plans_its_files(_format(state)) and can_be_planned(state)


def _plans_its_files(own_format: CheckpointFormat) -> bool:
    """Return True if a format can lay out the files that its method `files` writes.

    A subclass that defines `files` alone writes other files than the inherited `planned_files` lays out.
    """
    owner = next(kind for kind in type(own_format).__mro__ if "files" in vars(kind))
    return "planned_files" in vars(owner)


def _write_in_place(
    state: TrainingState, record: StepRecord, exchange: Exchange, attempt: int
) -> _Written | None:
    """Write the large files together with the holders; return None if they send their shards instead."""
    optimizers = chain(state.optimizer)
    in_place_holder.own_readers(optimizers, exchange)  # before any file is made
    try:
        layouts, small, spans, bad_weights = _plan(state, record, exchange)
    except CheckpointError:
        raise
    except Exception:  # CannotBePlanned, or an error of foreign code that reads a stand-in
        in_place.decline(exchange)
        return None
    try:
        with in_place.InPlace(layouts, optimizers, exchange, attempt) as archives:
            if not archives.write():
                return None
            bad_groups = _bad_shards(optimizers, archives.not_finite)
            _report(bad_groups, exchange)
            entries = archives.finish()
    except OSError as error:
        raise CheckpointError(f"{error.filename or exchange.folder}: {error.strerror or error}") from error
    bad_weights += _weights_among([subject for _, subject in archives.not_finite], spans)
    return entries, small, shards.not_finite_words([subject for subject, _ in bad_groups] or bad_weights)


def _report(bad_subjects: Sequence[tuple[str, int]], exchange: Exchange) -> None:
    """Tell `exchange` the parts that are not finite, each with its giver, if there are any."""
    if bad_subjects:
        descriptions = shards.not_finite_words([subject for subject, _ in bad_subjects])
        exchange.on_not_finite(descriptions, [rank for _, rank in bad_subjects])


# The layouts of the large files, the writers of the others, the source of each saved weight, and the names of
# weights that are not finite.
_Plan = tuple[Mapping[str, FileLayout[Source]], Files, list[tuple[str, Source]], list[str]]


def _plan(state: TrainingState, record: StepRecord, exchange: Exchange) -> _Plan:
    """Plan the files of the rank. Raises CheckpointError; another exception: gather the shards."""
    own_format = cast(PlannableFormat, _format(state))
    try:
        return _planned_with(own_format.planned_tensors(), state, record, exchange)
    except CannotBePlanned:
        pass
    planned = own_format.planned_tensors()
    with planned.follow_copies():  # not at first: following takes time for each function of torch
        plan = _planned_with(planned, state, record, exchange)
    sources = [
        entry.content
        for layout in plan[0].values()
        for entry in layout.entries
        if isinstance(entry.content, Source)
    ]
    planned_tensors.require_few_runs(sources, chain(state.optimizer))
    return plan


def _planned_with(
    planned: PlannedTensors, state: TrainingState, record: StepRecord, exchange: Exchange
) -> _Plan:
    own_format = cast(PlannableFormat, _format(state))
    weights = Weights(
        lambda tensor: planned.to_host(tensor, exchange.device.to_host),
        planned.cast,
        planned.is_finite,
        planned.requantize,
    )
    gathered = _add_all(weights, state, planned.state_of)
    body, bad_weights = _body(state, record, weights, gathered, exchange)
    spans = [
        (f"{key}.{name}", span)
        for key in state.chunks
        for name, tensor, _ in own_format.places(body[key])
        if (span := planned.range_of(tensor)) is not None
    ]
    layouts, small = own_format.planned_files(state, body, gathered, planned)
    return layouts, small, spans, bad_weights


def _bad_shards(
    optimizers: Sequence[Any], not_finite: Sequence[tuple[int, NotFinite]]
) -> list[tuple[str, int]]:
    """Return the non-finite shards, in order, each with its giver."""
    keys_by_shard: dict[tuple[int, int], tuple[set[str], int]] = {}
    for rank, bad_part in not_finite:
        if bad_part.dtype == "float32":
            keys_by_shard.setdefault((bad_part.position, bad_part.index), (set(), rank))[0].add(bad_part.key)
    named_shards = []
    for (position, index), (keys, rank) in sorted(keys_by_shard.items()):
        named_keys = [key for key in shards.KEYS if key in keys]
        named_shards.append((_shard_in_words(optimizers, position, index, named_keys), rank))
    return named_shards


def _shard_in_words(optimizers: Sequence[Any], position: int, index: int, keys: Iterable[str]) -> str:
    """Return the number of a shard in its group, and the `keys` of its tensors, in words."""
    counts = [shards.shard_of(optimizer)[1] for optimizer in optimizers]
    return f"shard {sum(counts[:position]) + index} of {sum(counts)} ({', '.join(keys)})"


def _weights_among(not_finite: Sequence[NotFinite], spans: Sequence[tuple[str, Source]]) -> list[str]:
    """Return the names of the saved weights of which a part is not finite."""
    return [
        name
        for name, span in spans
        if any(
            (bad_part.position, bad_part.number, bad_part.key) == (span.position, span.number, span.key)
            and bad_part.begin < span.end
            and span.begin < bad_part.end
            for bad_part in not_finite
        )
    ]


def _add_all(
    weights: Weights, state: TrainingState, state_of: Callable[[Any, int], dict[Any, Any]]
) -> list[Any]:
    """Add all main params to `weights`; return the state of each optimizer, None without shards.

    `state_of` returns the state of a sharded optimizer, by its position in the chain.
    """
    gathered: list[Any] = []
    for position, (optimizer, live, stored) in enumerate(state.chained):
        world = None
        if shards.is_sharded(optimizer) and state.has_owners and not stored:
            pass  # the weights are saved by another group, too
        elif shards.is_sharded(optimizer):
            world = state_of(optimizer, position)
            weights.add_sharded(optimizer, world)
        elif not shards.is_stub(optimizer):
            weights.add_whole(optimizer, live)
        gathered.append(world)
    return gathered


def _gather(
    state: TrainingState, record: StepRecord, exchange: Exchange, agreed: AgreedGroup | None
) -> _Written:
    """Gather all shards, and return the writers of all files of the format."""
    bad_subjects: list[tuple[str, int]] = []
    optimizers = chain(state.optimizer)

    def state_of(optimizer: Any, position: int) -> dict[Any, Any]:
        world = shards.gather(optimizer, position, exchange)
        shards.acknowledge(optimizers, position, exchange)
        for index, keys in shards.bad_shards(optimizer, world).items():
            description = _shard_in_words(optimizers, position, index, keys)
            bad_subjects.append((description, exchange.sources[position][index]))
        exchange.check()
        return world

    weights = Weights(exchange.device.to_host)
    gathered = _add_all(weights, state, state_of)
    body, not_finite = _body(state, record, weights, gathered, exchange)
    if all(world is None for world in gathered):  # otherwise its tensors have been examined
        whole_subjects = [] if shards.all_finite(body.get("optimizer")) else ["the optimizer state"]
        bad_subjects += [(subject, exchange.rank) for subject in (*whole_subjects, *not_finite)]
    _report(bad_subjects, exchange)
    given_sums.require_gathered(state, agreed, gathered, exchange)
    files = _format(state).files(state, body, gathered)
    return [], files, shards.not_finite_words([subject for subject, _ in bad_subjects] or not_finite)


def _on_top(state: TrainingState, record: StepRecord, agreed: AgreedGroup | None) -> Files:
    """Return the small files that do not depend on the format."""
    contents = {**state.on_top, **given_sums.part_of(state, agreed)}
    if state.writes_common:
        contents |= state.contents.files_of(record.step, record.counters)
    return {name: partial(_write, content) for name, content in contents.items()}


def _with_trackers(state: TrainingState, entries: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
    """Mark the files of which the save folder gets a copy."""
    names = {path: name for name, path in state.contents.trackers.items()}
    return tuple(replace(entry, tracker=names.get(entry.path)) for entry in entries)


def _write(content: bytes, file: HashingFile) -> None:
    file.write(content)


def _body(
    state: TrainingState, record: StepRecord, weights: Weights, gathered: Sequence[Any], exchange: Exchange
) -> tuple[dict[str, Any], list[str]]:
    """Return the saved dict, keys in the framework's order, and the names of non-finite weights."""
    body: dict[str, Any] = {}
    if state.args is not None:
        body["args"] = _args_of(state, record)
    body["checkpoint_version"] = 3.0
    body["iteration"] = record.step
    with state.buffers.saved_as(record.buffers, exchange.device.to_host):
        model = _format(state).model(state.chunks)
    if (keeps := state.contents.keeps) is not None:
        model = {
            key: {name: value for name, value in saved.items() if keeps(name)} for key, saved in model.items()
        }
    body.update(model)
    if not shards.is_stub(state.optimizer):
        states = _optimizers_of(state, record, exchange)
        body["optimizer"] = _format(state).optimizer(state, model, states, gathered)
    if record.scheduler is not None:
        body["opt_param_scheduler"] = dict(record.scheduler)
    if record.rerun is not None:
        body["rerun_state_machine"] = dict(record.rerun) or None
    body["rng_state"] = _format(state).rng([dict(states) for states in record.rng])
    if FLOPS in record.counters:
        body[FLOPS] = record.counters[FLOPS]
    body.update(state.extra)
    body.update(state.contents.entries_of(record.step, record.counters))
    not_finite: list[str] = []
    buffers = state.buffers.copies(record.buffers)
    for key, chunk in state.chunks.items():  # now that the optimizer no longer needs the live tensors
        bad = weights.rebuild(chunk, _format(state).places(model[key]), buffers)
        not_finite += [f"{key}.{name}" for name in bad]
        exchange.check()
    return body, not_finite


def _args_of(state: TrainingState, record: StepRecord) -> Any:
    """Copy the framework's arguments, as they were at the end of the step."""
    args = copy.copy(state.args)
    for name, value in record.counters.items():
        # In its arguments the framework keeps the operations at its start.
        if name != FLOPS:
            setattr(args, name, value)
    if hasattr(args, "curr_iteration"):
        # The index of the iteration that made the step; it counts from 0.
        args.curr_iteration = record.step - 1
    for name, value in state.args_overrides.items():
        setattr(args, name, value)
    # options of regular saves; a loader expects the saved parts that they name
    for name in LEFT_OUT:
        if getattr(args, name, None):
            setattr(args, name, None)
    return args


def _optimizers_of(state: TrainingState, record: StepRecord, exchange: Exchange) -> list[Any]:
    """Return the `state_dict` of each optimizer, with the scalars and the loss scale of the record."""
    saved = []
    for optimizer, groups, scaler in zip(chain(state.optimizer), record.groups, record.scalers, strict=True):
        # A fresh structure, but for tensors: its dicts are ours to change.
        body = optimizer.state_dict()
        inner = body.get("optimizer", body)
        for group, scalars in zip(inner["param_groups"], groups, strict=True):
            group.update(scalars)
        if scaler is not None:
            body["grad_scaler"] = dict(scaler)
        saved.append(_on_host(body, exchange))
    return saved


def _on_host(value: Any, exchange: Exchange) -> Any:
    """Copy the tensors of a nested state to the host; tensors on the host are returned as they are."""
    if isinstance(value, torch.Tensor):
        exchange.check()
        return value if value.device.type == "cpu" else exchange.device.to_host(value)
    if isinstance(value, dict):
        return {key: _on_host(item, exchange) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_host(item, exchange) for item in value]
    return value
