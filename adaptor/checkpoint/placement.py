"""Finds the place of a rank in the checkpoints of a Megatron job: its group, and its shards.

Invariant: all ranks find the same groups and shards, from the gathered reports of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from adaptor import context
from adaptor.checkpoint import shards, step_record
from adaptor.checkpoint.training_state import TrainingState, unwrapped
from adaptor.controller.plan import groups_of
from adaptor.protocol.environment import WorkerPlace
from adaptor.protocol.messages import Share
from adaptor.replica import tolerance
from adaptor.replica.group import gather_values
from adaptor.replica.mirror import Mirror


@dataclass(frozen=True)
class CheckpointPlacement:
    """The place of the rank in the checkpoints of a job.

    Attributes:
        group: the name of the files that the rank could write: ranks of one group write the same files
        first: the lowest rank of the group, which the framework lets write
        stored: per optimizer of the chain: whether this group saves its state
        shares: the shards of the rank, of its own group and of others
        survives: the possible losses that the job survives, in words; on rank 0
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
    """Find the shards and groups of the rank: collective.

    The shards of a group are the shards of the first optimizer of the chain, then of the second, ... With
    experts, ranks of different groups share the state of the dense optimizer: each group needs the whole
    state for its weights.

    Args:
        optimizer: the chain.
        mirrors: one per optimizer of the chain.
        group: the folder of the rank's files; equal on ranks with the same model.
        everyone: all ranks of the job.
        copies: whether the job may have copies in host memory (TTP_HOST_COPY).
    """
    inner = step_record.chain(optimizer)
    own_shards = [shards.shard_of(inner_optimizer) for inner_optimizer in inner]
    gathered = gather_values((group, [index for index, _ in own_shards]), everyone)
    groups = [name for name, _ in gathered]
    first = groups.index(group)
    shares: list[Share] = []
    offset, total = 0, sum(count for _, count in own_shards)
    for inner_optimizer, mirror, (index, count) in zip(inner, mirrors, own_shards, strict=True):
        held_shards = {index, mirror.index} if mirror is not None else {index}
        sharing = (
            dist.get_process_group_ranks(inner_optimizer.data_parallel_group)
            if shards.is_sharded(inner_optimizer)
            else []
        )
        for name in sorted({group, *(groups[rank] for rank in sharing)}):
            shares += [
                Share(name, offset + shard, total, can_write=name == group) for shard in sorted(held_shards)
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


def state_at(
    place: CheckpointPlacement,
    model: Sequence[Any],
    optimizer: Any,
    scheduler: Any,
    args: Any,
    **further_fields: Any,
) -> TrainingState:
    """Return the training state of a rank at `place`, from the objects of a framework with arguments.

    Args:
        place: of the rank.
        model: its chunks, wrapped or not.
        optimizer: the chain.
        scheduler: the parameter scheduler, or None.
        args: the framework's arguments; saved as on the rank that the framework lets write.
        further_fields: further fields of `TrainingState`.
    """
    return TrainingState(
        model=[unwrapped(chunk) for chunk in model],
        optimizer=optimizer,
        scheduler=scheduler,
        folder=place.group,
        args=args,
        args_overrides={
            "rank": place.first,
            "local_rank": place.first % context.part(WorkerPlace).local_size,
        },
        stored=place.stored,
        **further_fields,
    )
