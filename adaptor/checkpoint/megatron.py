"""What Megatron's `save_checkpoint` writes, from the live objects of a rank and the record of a step.

On data-parallel rank 0 of a model-parallel rank, in one of the framework's formats (`Form`); the same keys,
dtypes and bits. It runs in a thread beside a main thread that may hang in a broken collective, so it calls
only what is local in the framework (`state_dict` of a module, of an optimizer), and takes everything that a
main thread changes between two updates from the record.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from adaptor.checkpoint import finite, legacy, shards
from adaptor.checkpoint.buffers import Buffers
from adaptor.checkpoint.manifest import FileEntry, HashingFile
from adaptor.checkpoint.records import StepRecord, chain
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.weights import Place, Weights
from adaptor.errors import CheckpointError

FLOPS = "num_floating_point_operations_so_far"

# What writes the content of a file, by its path below the checkpoint folder.
Files = dict[str, Callable[[HashingFile], Any]]


class Form(Protocol):
    """A format of the framework.

    model      what the chunks save of themselves, by the chunks' keys, with live weights
    places     of the tensors in what one chunk saves
    optimizer  what the chain saves: from what `model` returned, what each optimizer saves without its shards,
               and the state that was gathered for each, None where it has no shards
    rng        what is saved of random states
    files      of all that is saved
    """

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]: ...

    def places(self, saved: Any) -> Sequence[Place]: ...

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], worlds: Sequence[Any]
    ) -> Any: ...

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any: ...

    def files(self, state: TrainingState, body: dict[str, Any], worlds: Sequence[Any]) -> Files: ...


@dataclass(frozen=True)
class TrainingState:
    """The live objects of the framework on this rank.

    model           its chunks, wrapped (DDP, Float16Module) or not
    optimizer       a ChainedOptimizer or a bare one
    scheduler       the parameter scheduler, None without one; for records, a dump does not read it
    folder          of this model-parallel rank below the checkpoint folder, as the framework names it
    args            the framework's namespace of arguments; None for a library user, who has none
    args_overrides  what the namespace would say on data-parallel rank 0 without the adaptor (`rank`, ...)
    extra           further entries beside the framework's own
    stored          per optimizer of the chain: whether this rank's group saves its state; empty: it does
    live            the optimizer that updates the model, where `optimizer` is a copy of it; else None
    form            the format to write
    """

    model: Sequence[Any]
    optimizer: Any
    scheduler: Any
    folder: str
    args: Any = None
    args_overrides: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    stored: tuple[bool, ...] = ()
    live: Any = None
    form: Form = field(default_factory=legacy.Legacy)

    @property
    def chunks(self) -> dict[str, Any]:
        """Of its model, by their keys in a checkpoint."""
        return {"model" if len(self.model) == 1 else f"model{n}": chunk for n, chunk in enumerate(self.model)}

    @property
    def chained(self) -> list[tuple[Any, Any, bool]]:
        """Each optimizer of the chain, the one that updates the model, and whether its state is saved."""
        mine = chain(self.optimizer)
        live = chain(self.live or self.optimizer)
        return list(zip(mine, live, self.stored or (True,) * len(mine), strict=True))

    @cached_property
    def buffers(self) -> Buffers:
        """Of its model."""
        return Buffers(self.model)

    def saves(self, what: str) -> bool:
        """Whether the framework was asked to save `what`: `optim` or `rng`."""
        return not getattr(self.args, f"no_save_{what}", False)


@dataclass(frozen=True)
class Written:
    """What was written; `not_finite` says what of it has a nan or an infinity in it, empty if nothing."""

    files: tuple[FileEntry, ...]
    not_finite: str


def unwrapped(chunk: Any) -> Any:
    """A model chunk without what the framework has wrapped around it (DDP, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def send_shards(state: TrainingState, writer: int, exchange: Exchange) -> None:
    """Sends what this rank was chosen to provide to the rank `writer` of the exchange's group.

    Raises CheckpointError, DumpCancelled, and what the process group raises when a peer is gone.
    """
    with torch.no_grad():
        shards.send(chain(state.optimizer), writer, exchange)


def write_files(
    state: TrainingState, record: StepRecord, exchange: Exchange, root: Path, attempt: int
) -> Written:
    """Gathers the shards from their holders and writes this rank's files below `root` (iter_N_tmp).

    Each is written and fsynced under a name that ends in the number of the `attempt`; the one who publishes
    gives them their names. So an attempt that was abandoned, and has not noticed, cannot touch the files of
    another. Raises like `send_shards`, and what `exchange.doubt` raises; what was written is removed then.
    """
    with torch.no_grad():
        files, not_finite = _contents(state, record, exchange)
        entries: list[FileEntry] = []
        drafts: list[Path] = []
        path = root
        try:
            for name in list(files):
                path = root / f"{name}.{attempt}"
                path.parent.mkdir(parents=True, exist_ok=True)
                drafts.append(path)
                with HashingFile(path, exchange.advanced) as file:
                    files.pop(name)(file)
                entries.append(file.entry(name, attempt))
        except BaseException as error:
            for draft in drafts:
                draft.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"{path}: {error.strerror or error}") from error
            raise
    return Written(tuple(entries), not_finite)


def _contents(state: TrainingState, record: StepRecord, exchange: Exchange) -> tuple[Files, str]:
    """What writes each file, and what of them is not finite, of which `exchange.doubt` hears."""
    weights, worlds, doubts = _gathered(state, exchange)
    body, not_finite = _body(state, record, weights, worlds, exchange)
    if all(world is None for world in worlds):  # else its tensors have been looked at
        whole = [] if finite.all_finite(body.get("optimizer")) else ["the optimizer state"]
        doubts += [(what, exchange.rank) for what in (*whole, *not_finite)]
    if doubts:
        exchange.doubt(finite.words([what for what, _ in doubts]), [rank for _, rank in doubts])
    return state.form.files(state, body, worlds), finite.words([what for what, _ in doubts] or not_finite)


def _gathered(state: TrainingState, exchange: Exchange) -> tuple[Weights, list[Any], list[tuple[str, int]]]:
    """All main params; the state of each optimizer, None of one without shards; what of it is not finite, and
    who gave it."""
    weights = Weights(exchange.to_host)
    worlds: list[Any] = []
    doubts: list[tuple[str, int]] = []
    optimizers = chain(state.optimizer)
    first, total = 0, sum(shards.shard_of(optimizer)[1] for optimizer in optimizers)
    for position, (optimizer, live, _) in enumerate(state.chained):
        world = None
        if shards.is_sharded(optimizer):
            world = shards.gather(optimizer, position, exchange)
            weights.add_sharded(optimizer, world)
            doubts += [
                (f"shard {first + index} of {total} ({', '.join(keys)})", exchange.sources[position][index])
                for index, keys in finite.bad_shards(optimizer, world).items()
            ]
            exchange.check()
        elif not shards.is_stub(optimizer):
            weights.add_whole(optimizer, live)
        first += shards.shard_of(optimizer)[1]
        worlds.append(world)
    shards.acknowledge(optimizers, exchange)
    return weights, worlds, doubts


def _body(
    state: TrainingState, record: StepRecord, weights: Weights, worlds: Sequence[Any], exchange: Exchange
) -> tuple[dict[str, Any], list[str]]:
    """What the framework saves, its keys in the framework's order; names of weights that are not finite."""
    body: dict[str, Any] = {}
    if state.args is not None:
        body["args"] = _args_of(state, record)
    body["checkpoint_version"] = 3.0
    body["iteration"] = record.step
    model = state.form.model(state.chunks)
    body.update(model)
    if state.saves("optim"):
        if not shards.is_stub(state.optimizer):
            states = _optimizers_of(state, record, exchange)
            body["optimizer"] = state.form.optimizer(state, model, states, worlds)
        if record.scheduler is not None:
            body["opt_param_scheduler"] = dict(record.scheduler)
    if record.rerun is not None:
        body["rerun_state_machine"] = dict(record.rerun)
    if state.saves("rng"):
        body["rng_state"] = state.form.rng([dict(states) for states in record.rng])
    if FLOPS in record.counters:
        body[FLOPS] = record.counters[FLOPS]
    body.update(state.extra)
    not_finite: list[str] = []
    buffers = state.buffers.copies(record.buffers)
    for key, chunk in state.chunks.items():  # now that the optimizer needs the live ones no longer
        bad = weights.rebuild(chunk, state.form.places(model[key]), buffers)
        not_finite += [f"{key}.{name}" for name in bad]
        exchange.check()
    return body, not_finite


def _args_of(state: TrainingState, record: StepRecord) -> Any:
    """A copy of the framework's arguments, as they were at the end of the step."""
    args = copy.copy(state.args)
    for name, value in record.counters.items():
        # In its arguments the framework keeps the operations that it started with.
        if name != FLOPS:
            setattr(args, name, value)
    if hasattr(args, "curr_iteration"):
        # The index of the iteration that made the step; it counts from 0.
        args.curr_iteration = record.step - 1
    for name, value in state.args_overrides.items():
        setattr(args, name, value)
    return args


def _optimizers_of(state: TrainingState, record: StepRecord, exchange: Exchange) -> list[Any]:
    """What the `state_dict` of each optimizer returns, with the scalars and the loss scale of the record."""
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
    """Copies the tensors of a nested state to the host; those that lie there stay what they are."""
    if isinstance(value, torch.Tensor):
        exchange.check()
        return value if value.device.type == "cpu" else exchange.to_host(value)
    if isinstance(value, dict):
        return {key: _on_host(item, exchange) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_host(item, exchange) for item in value]
    return value
