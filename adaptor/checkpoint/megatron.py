"""The files of Megatron's legacy `torch` format, written from the live objects of a rank and the record of a
step.

What Megatron's `save_checkpoint` writes on data-parallel rank 0 of a model-parallel rank:
`model_optim_rng.pt` and, with the distributed optimizer, `distrib_optim.pt`; the same keys, dtypes and bits.
It runs in a thread beside a main thread that may hang in a broken collective, so it calls only what is local
in the framework (`state_dict` of a module, of an optimizer), and takes everything that a main thread changes
between two updates from the record.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, cast

import torch

from adaptor.checkpoint import finite, shards
from adaptor.checkpoint.buffers import Buffers
from adaptor.checkpoint.manifest import FileEntry, HashingFile
from adaptor.checkpoint.records import StepRecord, chain
from adaptor.checkpoint.shards import Exchange
from adaptor.checkpoint.weights import Weights
from adaptor.errors import CheckpointError

MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
FLOPS = "num_floating_point_operations_so_far"


@dataclass(frozen=True)
class TrainingState:
    """The live objects of the framework on this rank.

    model           its chunks, wrapped (DDP, Float16Module) or not
    optimizer       a ChainedOptimizer or a bare one
    scheduler       the parameter scheduler, None without one; for records, a dump does not read it
    folder          of this model-parallel rank below the checkpoint folder, as the framework names it
    args            the framework's namespace of arguments; None for a library user, who has none
    args_overrides  what the namespace would say on data-parallel rank 0 without the adaptor (`rank`, ...)
    extra           further entries of model_optim_rng.pt
    stored          per optimizer of the chain: whether the optimizer file holds its state; empty: it does
    live            the optimizer that updates the model, where `optimizer` is a copy of it; else None
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
        contents, not_finite = _contents(state, record, exchange)
        folder = root / state.folder
        entries: list[FileEntry] = []
        path = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in list(contents):
                path = folder / f"{name}.{attempt}"
                with HashingFile(path, exchange.advanced) as file:
                    torch.save(contents.pop(name), cast(IO[bytes], file))
                entries.append(file.entry(f"{state.folder}/{name}", attempt))
        except BaseException as error:
            for draft in folder.glob(f"*.{attempt}"):
                draft.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"{path}: {error.strerror or error}") from error
            raise
    return Written(tuple(entries), not_finite)


def _contents(state: TrainingState, record: StepRecord, exchange: Exchange) -> tuple[dict[str, Any], str]:
    """The objects to save, by file name, and what of them is not finite, of which `exchange.doubt` hears."""
    weights = Weights(exchange.to_host)
    worlds: list[Any] = []
    doubts: list[tuple[str, int]] = []  # what is not finite, and who gave it
    optimizers = chain(state.optimizer)
    first, total = 0, sum(shards.shard_of(optimizer)[1] for optimizer in optimizers)
    live = chain(state.live or state.optimizer)
    for position, optimizer in enumerate(optimizers):
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
            weights.add_whole(optimizer, live[position])
        first += shards.shard_of(optimizer)[1]
        worlds.append(world if not state.stored or state.stored[position] else None)
    shards.acknowledge(optimizers, exchange)
    contents: dict[str, Any] = {}
    if any(world is not None for world in worlds) and state.saves("optim"):
        contents[OPTIMIZER_FILE] = worlds[0] if len(worlds) == 1 else worlds
    body, not_finite = _model_file(state, record, weights, exchange)
    contents[MODEL_FILE] = body
    if not any(map(shards.is_sharded, optimizers)):  # else its tensors have been looked at
        whole = [] if finite.all_finite(body.get("optimizer")) else ["the optimizer state"]
        doubts += [(what, exchange.rank) for what in (*whole, *not_finite)]
    if doubts:
        exchange.doubt(finite.words([what for what, _ in doubts]), [rank for _, rank in doubts])
    return contents, finite.words([what for what, _ in doubts] or list(not_finite))


def _model_file(
    state: TrainingState, record: StepRecord, weights: Weights, exchange: Exchange
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """model_optim_rng.pt, its keys in the framework's order."""
    body: dict[str, Any] = {}
    if state.args is not None:
        body["args"] = _args_of(state, record)
    body["checkpoint_version"] = 3.0
    body["iteration"] = record.step
    not_finite: list[str] = []
    buffers = state.buffers.copies(record.buffers)
    for number, chunk in enumerate(state.model):
        key = "model" if len(state.model) == 1 else f"model{number}"
        body[key], bad = weights.rebuild(chunk, buffers)
        not_finite += [f"{key}.{name}" for name in bad]
        exchange.check()
    if state.saves("optim"):
        if not shards.is_stub(state.optimizer):
            body["optimizer"] = _optimizer_of(state, record, exchange)
        if record.scheduler is not None:
            body["opt_param_scheduler"] = dict(record.scheduler)
    if record.rerun is not None:
        body["rerun_state_machine"] = dict(record.rerun)
    if state.saves("rng"):
        body["rng_state"] = [dict(states) for states in record.rng]
    if FLOPS in record.counters:
        body[FLOPS] = record.counters[FLOPS]
    body.update(state.extra)
    return body, tuple(not_finite)


def _args_of(state: TrainingState, record: StepRecord) -> Any:
    """A copy of the framework's arguments, as they were at the end of the step."""
    args = copy.copy(state.args)
    for name, value in record.counters.items():
        # In its arguments the framework keeps the operations that it started with.
        if name != FLOPS:
            setattr(args, name, value)
    # The index of the iteration that made the step; it counts from 0.
    args.curr_iteration = record.step - 1
    for name, value in state.args_overrides.items():
        setattr(args, name, value)
    return args


def _optimizer_of(state: TrainingState, record: StepRecord, exchange: Exchange) -> Any:
    """What the chain's `state_dict` returns, with the scalars and the loss scale of the record."""
    optimizers = chain(state.optimizer)
    saved = []
    for optimizer, groups, scaler in zip(optimizers, record.groups, record.scalers, strict=True):
        # A fresh structure, but for tensors: its dicts are ours to change.
        body = optimizer.state_dict()
        inner = body.get("optimizer", body)
        for group, scalars in zip(inner["param_groups"], groups, strict=True):
            group.update(scalars)
        if scaler is not None:
            body["grad_scaler"] = dict(scaler)
        saved.append(_on_host(body, exchange))
    return saved[0] if len(saved) == 1 else saved


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
