"""Writes a checkpoint of the newest step of which every rank has a whole host copy; all ranks do it together.

At a start, model and optimizer are built and the framework is about to load. Each rank reads its copy into
its optimizer, and the ranks write last words of that step as in an incident: the same groups, formats and
files, a folder that gets its name when it is complete, then the tracker. What the framework loads then is a
checkpoint like any other. The optimizers are put back to what they were.

Invariant: all ranks decide by what all have told, and each tells, whatever fails on it: all go the same way.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store

from adaptor import context, output, text
from adaptor.checkpoint import publish, step_record, tracker
from adaptor.checkpoint.placement import CheckpointPlacement
from adaptor.checkpoint.trainee import write_group
from adaptor.checkpoint.training_state import TrainingState
from adaptor.controller.plan import Plan, groups_of, plan
from adaptor.devices.device import Device
from adaptor.errors import CheckpointError
from adaptor.host_copy import content
from adaptor.protocol.copy_file import CopyFile, CopyHeader
from adaptor.protocol.environment import Generation, HeldCopies, Place
from adaptor.protocol.file_entry import FileEntry
from adaptor.protocol.messages import BoardRecord, Phase
from adaptor.protocol.state_provider import DumpRun
from adaptor.replica import twin
from adaptor.worker import dump_store

T = TypeVar("T")
# The start of the workers in which copies were made, and their step.
_Key = tuple[str, int]


def write_newest(
    save: Path,
    optimizer: Any,
    describe: Callable[[], tuple[TrainingState, CheckpointPlacement, Device]],
) -> int | None:
    """Write a checkpoint into `save` if all ranks have copies of a later step than it holds; collective.

    Args:
        save: the save folder.
        optimizer: the chain, as it was built.
        describe: returns the training state of this rank, its place in checkpoints and its device, where
            there is something to write; collective.

    Returns:
        The step that was written; None: there is none, or it could not be written, which a line says.
    """
    held = _held()
    told = _tell({key: header.world_size for key, (_, header) in held.items()})
    (saved,) = _from_first(tracker.tracked_step(save) if dist.get_rank() == 0 else None)
    later = {key for keys in told for key in keys if key[1] > (saved or 0)}
    size = dist.get_world_size()
    whole = [key for key in later if all(keys.get(key) == size for keys in told)]
    if not whole:
        if later:
            _say(_incomplete(later, told))
        return None
    state, place, device = describe()
    for key in sorted(whole, key=lambda key: (key[1], key[0]), reverse=True):
        file, header = held[key]
        try:
            with _put_back(optimizer):
                said = _write(save, key[1], file, header, state, place, device)
        finally:
            _close(held)
        if not said:
            since = f"later than step {saved}, which was saved" if saved is not None else "nothing was saved"
            _say(f"step {key[1]} is written from the copies in host memory ({since})")
            return key[1]
        _say(f"step {key[1]} cannot be written from the copies in host memory: {said}")
        held = _held()
    return None


def _held() -> dict[_Key, tuple[CopyFile, CopyHeader]]:
    """Return the whole copies of this rank that its agent holds."""
    found: dict[_Key, tuple[CopyFile, CopyHeader]] = {}
    rank = context.part(Place).rank
    for path in context.part(HeldCopies).paths.get(rank, ()):
        with contextlib.suppress(OSError):
            file = CopyFile(path)
            header = file.header
            if header is not None and header.rank == rank:
                found[header.generation, header.step] = file, header
            else:
                file.close()
    return found


def _close(held: dict[_Key, tuple[CopyFile, CopyHeader]]) -> None:
    for file, _ in held.values():
        file.close()


def _incomplete(later: set[_Key], told: Sequence[dict[_Key, int]]) -> str:
    newest = max(later, key=lambda key: (key[1], key[0]))
    without = [rank for rank, keys in enumerate(told) if newest not in keys]
    if not without:
        return f"the copies in host memory of step {newest[1]} are of a job with another number of ranks"
    ranks = ", ".join(map(str, without[:5])) + (" and others" if len(without) > 5 else "")
    return f"no step has copies in host memory of all ranks: of step {newest[1]} rank {ranks} has none"


def _write(
    save: Path,
    step: int,
    file: CopyFile,
    header: CopyHeader,
    state: TrainingState,
    place: CheckpointPlacement,
    device: Device,
) -> str:
    """Write the checkpoint of `step`; return why it could not be written, the same on all ranks."""
    found: list[content.Told] = []

    def read() -> None:
        if file.digest(header.size) != header.digest:
            raise CheckpointError(f"the copy of rank {header.rank} is damaged")
        found.append(content.read(file.content[: header.size], state, device))

    said = _first_of_all(read)
    if said:
        return said
    told = found[0]
    if state.args is not None:
        args = copy.copy(state.args)
        vars(args).update(told.arguments)  # the framework adds some only when it begins to train
        state = replace(state, args=args)
    generation, rank = context.part(Generation).name, dist.get_rank()
    folder: list[str] = []

    def prepare() -> None:
        if rank == 0:
            folder.append(str(publish.prepare(save, step, generation=generation)))

    said = _first_of_all(prepare)
    if said:
        return said
    (where,) = _from_first(folder[0] if rank == 0 else "")
    shares = dict(enumerate(_tell(place.shares)))
    board = BoardRecord(rank=0, phase=Phase.RUNNING, oldest=step, finished=step)
    chosen = plan(groups_of(shares), dict.fromkeys(shares, board), only=step)
    if not isinstance(chosen, Plan):
        return chosen.reason
    written: dict[str, tuple[FileEntry, ...]] = {}

    def write() -> None:
        for order in chosen.groups:
            if rank in order.ranks:
                run = DumpRun(
                    rank=rank,
                    folder=where,
                    attempt=0,
                    connect=lambda ranks, group=order.group: _meet(f"{step}/{group}", ranks, rank),  # type: ignore[misc]
                    progress=lambda count: None,
                    cancelled=lambda: False,
                    past=False,
                )
                files = write_group(state, (None,) * len(state.chained), device, told.record, order, run)
                if rank == order.writer:
                    written[order.group] = files

    said = _first_of_all(write)
    if said:
        return said
    everything = [entry for files in _tell(written) for entries in files.values() for entry in entries]

    def name() -> None:
        if rank == 0:
            holders = {order.group: order.holders for order in chosen.groups}
            publish.publish(save, step, everything, holders, len(shares), generation)

    return _first_of_all(name)


def _meet(name: str, ranks: tuple[int, ...], rank: int) -> ProcessGroupGloo:
    """Return a gloo group of `ranks`; the framework's own store is alive, and everyone is there."""
    prefix = f"ttp/host-copy/{context.part(Generation).name}/{name}"
    timeout_s = context.get().settings.timeout_s
    return dump_store.meet(_get_default_store(), prefix, ranks.index(rank), len(ranks), timeout_s)


@contextlib.contextmanager
def _put_back(optimizer: Any) -> Iterator[None]:
    """Let the optimizers have the state and the scalars again that they had before; what they update is
    about to be loaded."""
    inner = step_record.inner(optimizer)
    before = [(twin.scalars(one), dict(one.state)) for one in inner]
    try:
        yield
    finally:
        for one, (groups, state) in zip(inner, before, strict=True):
            one.state.clear()
            one.state.update(state)
            for group, scalars in zip(one.param_groups, groups, strict=True):
                for key in group.keys() - scalars.keys() - {"params"}:
                    del group[key]
                group.update(scalars)


def _first_of_all(act: Callable[[], None]) -> str:
    """Call `act` on all ranks; return the first error that any of them had, in words; empty: none."""
    said = ""
    try:
        act()
    except Exception as error:  # the others wait for the answer, whatever it is
        said = str(error) if isinstance(error, CheckpointError) else text.describe(error)
    return next(filter(None, _tell(said)), "")


def _tell(what: T) -> list[T]:
    """Return what each rank tells; collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, what)
    return told


def _from_first(what: T) -> list[T]:
    told = [what]
    dist.broadcast_object_list(told, src=0)
    return told


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        output.tell(f"[ttp] {line}", to="stdout")
