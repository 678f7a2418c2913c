"""Megatron's training state behind the interface that the control plane knows (`control.session.Trainee`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from adaptor import config, devices
from adaptor.checkpoint import megatron, records, shards
from adaptor.checkpoint.local_copy import LocalCopy
from adaptor.checkpoint.manifest import FileEntry
from adaptor.checkpoint.megatron import TrainingState
from adaptor.checkpoint.records import StepRecord
from adaptor.checkpoint.rng import RandomStates
from adaptor.checkpoint.shards import Exchange
from adaptor.control.messages import GroupOrder, Share
from adaptor.control.session import DumpRun, NotFiniteError
from adaptor.devices.device import Device
from adaptor.replica import choice, kinds, twin
from adaptor.replica.mirror import Mirror
from adaptor.replica.ring import Ring, stride


@dataclass(frozen=True)
class _Door:
    """What a step has changed when it stands at the door, and by how much it moves the rest afterwards."""

    scalers: tuple[Mapping[str, Any] | None, ...]
    rng: Sequence[Mapping[str, Any]]
    buffers: tuple[torch.Tensor | None, ...]
    rerun: Mapping[str, Any] | None
    growth: Mapping[str, int | float]
    increment: int
    also: Mapping[str, Any]


@dataclass(frozen=True)
class MegatronTrainee:
    """A rank of a Megatron job.

    state      the live objects
    save       the folder of checkpoints
    shares     what this rank holds
    random     the random states that are saved
    counters   the counters as they are now, under the framework's names
    growth     by how much the step that runs now moves each counter
    increment  by how many samples it moves the scheduler
    barrier    a barrier of all ranks of the job
    mirrors    per optimizer of the chain: the copy of a neighbour's shard, None where there is none
    rerun      what a checkpoint has of the framework's rerun state machine, None where it has nothing
    local_copy of the state before an update; None: with the barrier nobody has to go back
    also       what else the framework says, as keywords, when it moves the scheduler
    """

    state: TrainingState
    save: str
    shares: tuple[Share, ...]
    random: RandomStates
    counters: Callable[[], Mapping[str, int | float]]
    growth: Callable[[], Mapping[str, int | float]]
    increment: Callable[[], int]
    barrier: Callable[[], None]
    mirrors: tuple[Mirror | None, ...] = ()
    rerun: Callable[[], Mapping[str, Any] | None] = lambda: None
    local_copy: LocalCopy | None = None
    also: Callable[[], Mapping[str, Any]] = dict

    @property
    def goes_back(self) -> bool:
        return self.local_copy is not None

    @cached_property
    def device(self) -> Device:
        """First asked for on the main thread, when training begins."""
        mains = (param for one in records.inner(self.state.optimizer) for param in twin.params(one))
        weights = (param for chunk in self.state.model for param in chunk.parameters())
        return devices.of(chain(mains, weights))

    def copy_state(self) -> None:
        assert self.local_copy is not None
        self.local_copy.take()

    def exchange(self) -> None:
        for mirror in filter(None, self.mirrors):
            mirror.exchange()
        self.device.catch_up()

    def update_replicas(self) -> None:
        for mirror in filter(None, self.mirrors):
            mirror.update()

    def take_record(self, step: int) -> StepRecord:
        state = self.state
        return records.take(
            step,
            self.counters(),
            state.optimizer,
            state.scheduler,
            self.random.take(),
            state.buffers.take(),
            self.rerun(),
        )

    def take_door(self) -> _Door:
        return _Door(
            records.take_scalers(self.state.optimizer),
            self.random.exchange(),
            self.state.buffers.take(),
            self.rerun(),
            dict(self.growth()),
            self.increment(),
            dict(self.also()),
        )

    def derive(self, record: StepRecord, door: _Door, updated: bool) -> StepRecord:
        return records.advance(
            record,
            updated=updated,
            scheduler=self.state.scheduler,
            increment=door.increment,
            growth=door.growth,
            scalers=door.scalers,
            rng=door.rng,
            buffers=door.buffers,
            rerun=door.rerun,
            also=door.also,
        )

    def has_state(self) -> bool:
        # Others save what they have: there may be nothing besides the params, as with plain SGD.
        sharded = [one for one in records.chain(self.state.optimizer) if shards.is_sharded(one)]
        return not sharded or any(one.optimizer.state for one in sharded)

    def dump(self, record: StepRecord, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        state, mirrors = self.state, self.mirrors
        if run.past:
            assert self.local_copy is not None
            state = replace(state, optimizer=self.local_copy.optimizer, live=state.optimizer)
            mirrors = self.local_copy.mirrors
        ranks = order.ranks
        holders = iter([ranks.index(holder) for holder in order.holders])
        counts = [shards.shard_of(inner)[1] for inner in records.chain(self.state.optimizer)]

        def doubt(what: str, places: Sequence[int]) -> None:
            if not run.as_is:
                raise NotFiniteError(what, tuple(sorted({ranks[place] for place in places})))

        exchange = Exchange(
            group=run.connect(ranks) if len(ranks) > 1 else None,
            rank=ranks.index(run.rank),
            sources=[list(islice(holders, count)) for count in counts],
            mirrors=mirrors,
            device=self.device,
            progress=run.progress,
            cancelled=run.cancelled,
            doubt=doubt,
        )
        with self.device.beside():
            if run.rank != order.writer:
                megatron.send_shards(state, ranks.index(order.writer), exchange)
                return ()
            written = megatron.write_files(state, record, exchange, Path(run.folder), run.attempt)
        run.remark(written.not_finite)
        return written.files


def replicas_of(optimizer: Any, size: int, experts: int) -> tuple[Mirror | None, ...]:
    """The copies of neighbours' shards, one per optimizer of the chain, None where there are none.

    On every rank at the same time, the state loaded. Rank 0 tells the user which replicas the job has.

    Args:
        size: of the data-parallel group, context parallel included.
        experts: ranks that have the same experts.

    Raises:
        LayoutError: a shard cannot be mirrored, or what an optimizer keeps is not protected.
    """
    for torchs in records.inner(optimizer):
        kinds.require_protected(torchs)
    inner = records.chain(optimizer)
    sharded = [one for one in inner if shards.is_sharded(one)]
    made = size // sharded[0].data_parallel_group.size() if sharded else 1
    sizes = [one.data_parallel_group.size() for one in sharded]
    if sharded and choice.wants_mirrors(size, made, experts):
        mirrors = tuple(
            mirror_of(one) if one in sharded and one.data_parallel_group.size() > 1 else None for one in inner
        )
    else:
        mirrors = (None,) * len(inner)
    if dist.get_rank() == 0:
        elements = sum(
            param.numel()
            for one in sharded
            for group in one.optimizer.param_groups
            for param in group["params"]
        )
        taken = sum(mirror.nbytes for mirror in mirrors if mirror is not None)
        print(f"[ttp] {choice.words(size, made, bool(sharded), elements, taken, 1 in sizes)}", flush=True)
    return mirrors


def local_copy_of(optimizer: Any, mirrors: Sequence[Mirror | None]) -> LocalCopy | None:
    """The local copy, where the user asked for one (TTP_LOCAL_COPY). Rank 0 tells what it takes."""
    if not config.load().local_copy:
        return None
    made = LocalCopy(optimizer, mirrors)
    if dist.get_rank() == 0:
        print(
            "[ttp] a local copy of the optimizer state before each update, in place of the barrier: "
            f"{made.nbytes / 2**20:.1f} MiB more on rank 0",
            flush=True,
        )
    return made


def mirror_of(optimizer: Any) -> Mirror:
    """The copy of the neighbour's shard of a distributed optimizer; on every rank of its group."""
    return Mirror(
        optimizer.optimizer,
        shards.places(optimizer),
        Ring(optimizer.data_parallel_group, apart(optimizer)),
        optimizer.buffers[0].grad_data.device,
    )


def apart(optimizer: Any) -> int:
    """How many places behind a rank of its group the one is that has the copy of its shard."""
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return stride([rank // local for rank in dist.get_process_group_ranks(optimizer.data_parallel_group)])


@dataclass(frozen=True)
class Place:
    """Where this rank stands in the checkpoints of a job.

    group   the name of the files that it could write: ranks of one group write the same
    first   the lowest rank of the group, which the framework lets write
    stored  per optimizer of the chain: whether this group saves its state
    shares  what this rank holds, of its own group and of others
    """

    group: str
    first: int
    stored: tuple[bool, ...]
    shares: tuple[Share, ...]


def place_of(
    optimizer: Any, mirrors: Sequence[Mirror | None], group: str, everyone: dist.ProcessGroup
) -> Place:
    """On every rank at the same time: what it holds of which group.

    The shards of a group are those of the first optimizer of the chain, then those of the second, ... With
    experts, ranks of different groups share the state of the dense optimizer: each needs all of it to write
    its weights.

    Args:
        optimizer: the chain.
        mirrors: one per optimizer of the chain.
        group: the folder of this rank's files; ranks whose model is the same have the same.
        everyone: all ranks of the job.
    """
    inner = records.chain(optimizer)
    own = [shards.shard_of(one) for one in inner]
    told: list[Any] = [None] * everyone.size()
    dist.all_gather_object(told, (group, [index for index, _ in own]), group=everyone)
    groups = [name for name, _ in told]
    first = groups.index(group)
    shares: list[Share] = []
    offset, total = 0, sum(count for _, count in own)
    for one, mirror, (index, count) in zip(inner, mirrors, own, strict=True):
        held = {index, mirror.index} if mirror is not None else {index}
        sharing = dist.get_process_group_ranks(one.data_parallel_group) if shards.is_sharded(one) else []
        for name in sorted({group, *(groups[rank] for rank in sharing)}):
            shares += [Share(name, offset + shard, total, name != group) for shard in sorted(held)]
        offset += count
    return Place(group, first, tuple(index == 0 for index in told[first][1]), tuple(shares))
