"""Megatron's training state behind the interface that the control plane knows (`control.session.Trainee`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adaptor.checkpoint import megatron, records, shards
from adaptor.checkpoint.manifest import FileEntry
from adaptor.checkpoint.megatron import TrainingState
from adaptor.checkpoint.records import StepRecord
from adaptor.checkpoint.shards import Exchange
from adaptor.control.messages import GroupOrder, Share
from adaptor.control.session import DumpRun
from adaptor.errors import LayoutError
from adaptor.replica import choice
from adaptor.replica.mirror import Mirror
from adaptor.replica.ring import Ring, stride


@dataclass(frozen=True)
class _Door:
    """What a step has changed when it stands at the door, and by how much it moves the rest afterwards."""

    scalers: tuple[Mapping[str, Any] | None, ...]
    rng: Mapping[str, Any]
    growth: Mapping[str, int | float]
    increment: int


@dataclass(frozen=True)
class MegatronTrainee:
    """A rank of a Megatron job.

    state      the live objects
    save       the folder of checkpoints
    shares     what this rank holds
    tracker    the framework's CUDA RNG tracker
    counters   the counters as they are now, under the framework's names
    growth     by how much the step that runs now moves each counter
    increment  by how many samples it moves the scheduler
    barrier    a barrier of all ranks of the job
    mirrors    per optimizer of the chain: the copy of a neighbour's shard, None where there is none
    """

    state: TrainingState
    save: str
    shares: tuple[Share, ...]
    tracker: Any
    counters: Callable[[], Mapping[str, int | float]]
    growth: Callable[[], Mapping[str, int | float]]
    increment: Callable[[], int]
    barrier: Callable[[], None]
    mirrors: tuple[Mirror | None, ...] = ()

    def exchange(self) -> None:
        for mirror in filter(None, self.mirrors):
            mirror.exchange()

    def update_replicas(self) -> None:
        for mirror in filter(None, self.mirrors):
            mirror.update()

    def take_record(self, step: int) -> StepRecord:
        state = self.state
        return records.take(step, self.counters(), state.optimizer, state.scheduler, self.tracker)

    def take_door(self) -> _Door:
        scalers = records.take_scalers(self.state.optimizer)
        return _Door(scalers, records.take_rng(self.tracker), dict(self.growth()), self.increment())

    def derive(self, record: StepRecord, door: _Door, updated: bool) -> StepRecord:
        return records.advance(
            record,
            updated=updated,
            scheduler=self.state.scheduler,
            increment=door.increment,
            growth=door.growth,
            scalers=door.scalers,
            rng=door.rng,
        )

    def has_state(self) -> bool:
        return any(inner.optimizer.state for inner in records.chain(self.state.optimizer))

    def dump(self, record: StepRecord, order: GroupOrder, run: DumpRun) -> tuple[FileEntry, ...]:
        ranks = tuple(sorted(set(order.holders)))
        exchange = Exchange(
            group=run.connect(ranks) if len(ranks) > 1 else None,
            rank=ranks.index(run.rank),
            sources=[[ranks.index(holder) for holder in order.holders]],
            mirrors=self.mirrors,
            progress=run.progress,
            cancelled=run.cancelled,
        )
        if run.rank != order.writer:
            megatron.send_shards(self.state, ranks.index(order.writer), exchange)
            return ()
        written = megatron.write_files(self.state, record, exchange, Path(run.folder), run.attempt)
        if written.not_finite:
            some = ", ".join(written.not_finite[:3])
            print(f"[ttp] rank {run.rank}: {len(written.not_finite)} saved weights are not finite: {some}")
        return written.files


def replicas_of(optimizer: Any, size: int) -> tuple[Mirror | None, ...]:
    """The copies of neighbours' shards, one per optimizer of the chain, None where there are none.

    On every rank at the same time, the state loaded. Rank 0 tells the user which replicas the job has.

    Args:
        size: of the data-parallel group, context parallel included.

    Raises:
        LayoutError: a shard cannot be mirrored.
    """
    inner = records.chain(optimizer)
    sharded = [one for one in inner if shards.is_sharded(one)]
    made = size // sharded[0].data_parallel_group.size() if sharded else 1
    if sharded and choice.wants_mirrors(size, made):
        mirrors = tuple(_mirror(one) if one in sharded else None for one in inner)
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
        print(f"[ttp] {choice.words(size, made, bool(sharded), elements, taken)}", flush=True)
    return mirrors


def _mirror(optimizer: Any) -> Mirror:
    group, local = optimizer.data_parallel_group, int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = [rank // local for rank in dist.get_process_group_ranks(group)]
    return Mirror(optimizer.optimizer, shards.places(optimizer), Ring(group, stride(nodes)))


def shares_of(
    optimizer: Any, mirrors: Sequence[Mirror | None], tensor_rank: int, pipeline_rank: int
) -> tuple[Share, ...]:
    """What this rank holds: each model-parallel rank has one group, cut into the shards of an instance.

    Raises:
        LayoutError: the optimizer is a chain of several.
    """
    inner = records.chain(optimizer)
    if len(inner) != 1:
        raise LayoutError(f"the optimizer is a chain of {len(inner)}: one alone can be protected yet")
    index, count = shards.shard_of(inner[0])
    held = {index, *(mirror.index for mirror in mirrors if mirror is not None)}
    group = f"tp{tensor_rank}-pp{pipeline_rank}"
    return tuple(Share(group, shard, count) for shard in sorted(held))
