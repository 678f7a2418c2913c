"""The live objects of a rank that a checkpoint is made of, its place in the checkpoints, and what a format
has to do.

Invariant of `place_of`: all ranks find the same groups and shards, from the gathered reports of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from adaptor import context, plug_ins
from adaptor.checkpoint import layer_wise, shards, step_record
from adaptor.checkpoint.amax_histories import AmaxHistories
from adaptor.checkpoint.archive_layout import FileLayout
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.planned_tensors import PlannedTensors, Source
from adaptor.checkpoint.step_record import chain
from adaptor.checkpoint.weights import TensorSlot
from adaptor.controller.plan import groups_of
from adaptor.protocol.environment import WorkerPlace
from adaptor.protocol.messages import Share
from adaptor.replica import tolerance
from adaptor.replica.group import gather_values
from adaptor.replica.mirror import Mirror


class Buffers:
    """The saved buffers of the chunks of a model.

    The framework changes buffers outside of the optimizer: a router's expert bias when the gradients are
    final, a running mean in the forward pass. So buffers belong to the next step long before its update, and
    a dump takes them from the record of the step. A buffer is known by its module and its name: the framework
    may give it other memory.
    """

    def __init__(self, model: Sequence[torch.nn.Module]) -> None:
        """`histories`: the state of delayed scaling."""
        self._places = [
            (module, name)
            for chunk in model
            for module in chunk.modules()
            for name in module._buffers
            if name not in module._non_persistent_buffers_set
        ]
        self.histories = AmaxHistories(model)

    def take(self, *, between_steps: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Return copies of the current buffers, None where there is no buffer, and then of `histories`."""
        histories = self.histories.take_between_steps() if between_steps else self.histories.take()
        buffers = (None if live is None else live.detach().clone() for live in self._live())
        return (*buffers, *histories)

    def copies(self, taken: Sequence[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        """Return the copies in `taken`, by the current address of the live buffer."""
        return {
            live.data_ptr(): copy
            for live, copy in zip(self._live(), taken, strict=False)
            if live is not None and copy is not None and live.numel()
        }

    @torch.no_grad()
    def put_back(self, taken: Sequence[torch.Tensor | None]) -> None:
        """Restore the values that `take` has copied in the live buffers."""
        for live, copy in zip(self._live(), taken, strict=False):
            if live is not None and copy is not None:
                live.copy_(copy)
        self.histories.put_back(self._of_histories(taken))

    def saved_as(
        self, taken: Sequence[torch.Tensor | None], to_host: Callable[[torch.Tensor], torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Let modules return the histories in `taken` as their `_extra_state`."""
        return self.histories.saved_as(self._of_histories(taken), to_host)

    def _of_histories(self, taken: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        return [copy for copy in taken[len(self._places) :] if copy is not None]

    def _live(self) -> list[torch.Tensor | None]:
        return [module._buffers[name] for module, name in self._places]


FLOPS = "num_floating_point_operations_so_far"

# The functions that write the files, by path below the checkpoint folder.
Files = dict[str, Callable[[HashingFile], Any]]


@dataclass(frozen=True)
class CheckpointContents:
    """The contents of a framework's checkpoints besides model, optimizer, scheduler and random states.

    `entries_of` and `files_of` are called with a finished step and its counters when last words are written,
    in a thread beside the main thread: both read nothing that the main thread changes, and communicate with
    no other rank.

    Attributes:
        counters: returns the framework's counters by name, between two steps
        growth: returns the growth of each counter in the running step; called before the update
        entries_of: returns the entries of the checkpoint's common part for a step
        files_of: returns the small files of the checkpoint for a step, by path below the folder; only the
            files of rank 0 are written
        trackers: by name in the save folder: the file of the checkpoint which is copied there when a
            checkpoint is published
        metadata: for `torch_dist`: the framework's argument for all `sharded_state_dict`
        random: for `torch_dist`: the saved ShardedObject of random states
        keeps: whether an entry of the model is saved, by name; None: all are
    """

    counters: Callable[[], Mapping[str, int | float]] = dict
    growth: Callable[[], Mapping[str, int | float]] = dict
    entries_of: Callable[[int, Mapping[str, int | float]], Mapping[str, Any]] = lambda step, counters: {}
    files_of: Callable[[int, Mapping[str, int | float]], Mapping[str, bytes]] = lambda step, counters: {}
    trackers: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None
    random: Any = None
    keeps: Callable[[str], bool] | None = None


class CheckpointFormat(Protocol):
    """A format of checkpoints."""

    def model(self, chunks: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved dict of each of the `chunks` of the model, by their keys, with live weights."""

    def places(self, saved: Any) -> Sequence[TensorSlot]:
        """Return the tensors in the `saved` dict of one chunk, each with a function that replaces it."""

    def optimizer(
        self, state: TrainingState, model: Mapping[str, Any], states: Sequence[Any], gathered: Sequence[Any]
    ) -> Any:
        """Return the saved value of the chain of optimizers.

        `states`: the saved state of each without its shards; `gathered`: the gathered state, None without
        shards.
        """

    def rng(self, states: Sequence[Mapping[str, Any]]) -> Any:
        """Return random states as they are saved; `states` has one for each data-parallel rank."""

    def files(self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any]) -> Files:
        """Return the files of the rank: for each path below the checkpoint a function that writes the file.

        `body`: the saved dict besides the optimizer's gathered state; `gathered`: as for `optimizer`.
        """


# Named by an entry point of `ttp_adaptor.formats`: makes the format in which a rank writes last words, on
# each rank at the same time, from its state, complete but for its format, and the lowest rank of its group,
# which the framework lets write. Raises UnsupportedError if the format cannot hold this state.
FormatFactory = Callable[["TrainingState", int], CheckpointFormat]


class PlannableFormat(CheckpointFormat, Protocol):
    """A format whose large files can be laid out before the shards have arrived."""

    def planned_tensors(self) -> PlannedTensors:
        """Return the maker of the stand-ins for the state that is not gathered."""

    def planned_files(
        self, state: TrainingState, body: dict[str, Any], gathered: Sequence[Any], planned: PlannedTensors
    ) -> tuple[Mapping[str, FileLayout[Source]], Files]:
        """Return the files of the rank, by path below the checkpoint: layouts, and functions that write.

        `body` and `gathered` have stand-ins. Raises CannotBePlanned if the place of some content is not
        known.
        """


@dataclass(frozen=True)
class TrainingState:
    """The live objects of the framework on the rank.

    Attributes:
        model: its chunks, wrapped (DDP, Float16Module) or not
        optimizer: a ChainedOptimizer or a bare optimizer
        folder: of the model-parallel rank below the checkpoint folder, as the framework names the folder
        args: the framework's namespace of arguments; None for a library user without arguments
        args_overrides: the values of the namespace on data-parallel rank 0 without the adaptor (`rank`, ...)
        extra: further entries beside the framework's own
        stored: per optimizer of the chain: whether the rank's group saves the state; empty: yes
        beside: further files of the rank's folder, by name, unknown to the framework
        on_top: further files of the checkpoint, by path below the folder, in every format
        writes_common: whether the rank writes the files that a checkpoint has once
        live: the optimizer that updates the model, where `optimizer` is a copy; else None
        format: the format of last words; None for `torch` (`format_torch.TorchFormat`)
    """

    model: Sequence[Any]
    optimizer: Any
    scheduler: Any
    folder: str
    args: Any = None
    args_overrides: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    stored: tuple[bool, ...] = ()
    beside: Mapping[str, bytes] = field(default_factory=dict)
    on_top: Mapping[str, bytes] = field(default_factory=dict)
    contents: CheckpointContents = CheckpointContents()
    writes_common: bool = False
    live: Any = None
    format: CheckpointFormat | None = None

    @property
    def chunks(self) -> dict[str, Any]:
        """The chunks of the model, by their keys in a checkpoint."""
        return {"model" if len(self.model) == 1 else f"model{n}": chunk for n, chunk in enumerate(self.model)}

    @property
    def chained(self) -> list[tuple[Any, Any, bool]]:
        """Return each optimizer of the chain, its original that updates the model, and whether saved."""
        own_chain = chain(self.optimizer)
        live = chain(self.live or self.optimizer)
        return list(zip(own_chain, live, self.stored or (True,) * len(own_chain), strict=True))

    @property
    def has_owners(self) -> bool:
        """Return whether other ranks with this model update other params (`layer_wise`)."""
        return layer_wise.has_owners(self.optimizer)

    @cached_property
    def buffers(self) -> Buffers:
        """The saved buffers of the model."""
        return Buffers(self.model)


def unwrapped(chunk: Any) -> Any:
    """Return a model chunk without the framework's wrappers (DDP, Float16Module)."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def format_named(name: str, setting: str) -> FormatFactory:
    """Return the maker of the format for last words that is chosen in `setting`, an entry point of
    `ttp_adaptor.formats`. Raises ConfigError.
    """
    return cast(FormatFactory, plug_ins.choose(plug_ins.FORMATS, name, setting, "or set ENABLE_TTP=False"))


@dataclass(frozen=True)
class CheckpointPlacement:
    """The place of the rank in the checkpoints of a job.

    Attributes:
        group: the name of the files that the rank could write: ranks of one group write the same files
        first: the lowest rank of the group, which the framework lets write
        stored: per optimizer of the chain: whether this group saves its state
        shares_by_rank: the shards of all ranks, with TTP_VERIFY_EVERY
    """

    group: str
    first: int
    stored: tuple[bool, ...]
    shares: tuple[Share, ...]
    survives: str
    shares_by_rank: Sequence[tuple[Share, ...]]


def place_of(
    optimizer: Any,
    mirrors: Sequence[Mirror | None],
    group: str,
    everyone: dist.ProcessGroup,
    *,
    copies: bool = True,
) -> CheckpointPlacement:
    """Find the shards and groups of the rank: collective among `everyone`.

    The shards of a group are the shards of the first optimizer of the chain, then of the second, ... With
    experts, ranks of different groups share the state of the dense optimizer: each group needs the whole
    state for its weights. `group`: the folder of the rank's files, equal on ranks with the same model;
    `copies`: whether the job may have copies in host memory (TTP_HOST_COPY).
    """
    inner = step_record.chain(optimizer)
    own_shards = [shards.shard_of(inner_optimizer) for inner_optimizer in inner]
    gathered = gather_values((group, [index for index, _ in own_shards]), everyone)
    groups = [name for name, _ in gathered]
    first = groups.index(group)
    shares: list[Share] = []
    offset, total = 0, sum(count for _, count in own_shards)
    has_owners = layer_wise.has_owners(optimizer)
    unsharded = sum(not shards.is_sharded(inner_optimizer) for inner_optimizer in inner)
    for inner_optimizer, mirror, (index, count) in zip(inner, mirrors, own_shards, strict=True):
        held_shards = {index, mirror.index} if mirror is not None else {index}
        sharing = (
            dist.get_process_group_ranks(inner_optimizer.data_parallel_group)
            if shards.is_sharded(inner_optimizer)
            else []
        )
        names = {group, *(groups[rank] for rank in sharing)}
        size = total
        if has_owners and sharing:  # the first rank alone saves weights that have shards
            names = {groups[sharing[0]]}
        elif has_owners and not all(index == 0 for index, _ in own_shards):
            size = unsharded
        for name in sorted(names):
            shares += [
                Share(name, offset + shard, size, can_write=name == group) for shard in sorted(held_shards)
            ]
        offset += count
    stored = tuple(index == 0 for index in gathered[first][1])
    kind = "mirror" if any(mirrors) else "split" if any(map(shards.is_sharded, inner)) else "whole copies"
    copied = tolerance.steps_between_copies(context.get().settings.host_copy) if copies else None
    everywhere = gather_values((tuple(shares), context.part(WorkerPlace).node), everyone)
    survives = _survives(kind, everywhere, copied) if everyone.rank() == 0 else ""
    compares = context.get().settings.verify_every != 0
    shares_by_rank = [shares_of_rank for shares_of_rank, _ in everywhere if compares]
    return CheckpointPlacement(group, first, stored, tuple(shares), survives, shares_by_rank)


def _survives(kind: str, everywhere: Sequence[tuple[tuple[Share, ...], int]], copied: int | None) -> str:
    """Return the possible losses, by the shards and the node of each rank."""
    shares_by_rank = {rank: shares for rank, (shares, _) in enumerate(everywhere)}
    nodes = {rank: node for rank, (_, node) in enumerate(everywhere)}
    alone = all(
        len(owners) == 1
        for shard_group in groups_of(shares_by_rank).values()
        for owners in shard_group.owners.values()
    )
    return tolerance.survives("no second copies" if alone else kind, shares_by_rank, nodes, copied)
