"""The groups of `mindio_ttp.modellink`, for a ModelLink (af1347) edited after the guide.

Separate from the optimizer, because the framework imports the groups before its own optimizer exists.
"""

from __future__ import annotations

import torch.distributed as dist

from adaptor import context
from adaptor.context import Context
from adaptor.errors import UnsupportedError
from adaptor.frameworks import ascendspeed_shards as shards


class DataParallel:
    """The data-parallel ranks of this process, a part of its context."""

    def __init__(self, context: Context) -> None:
        self.ranks: list[int] = []


def build_optimizer_replica_group(ranks: list[int]) -> None:
    """Cut a data-parallel group; for each of them, on every rank."""
    if len(ranks) % shards.HALVES:
        raise UnsupportedError(
            f"build_optimizer_replica_group: {len(ranks)} data-parallel ranks cannot be cut in two: "
            "use an even number; for an odd one leave the call out, and take TTPOddReplicaOptimizer"
        )
    shards.cut_one(tuple(ranks))
    if dist.get_rank() in ranks:
        context.part(DataParallel).ranks = list(ranks)


def get_dp_rank_list() -> list[int]:
    """The data-parallel ranks of this rank."""
    return list(context.part(DataParallel).ranks)


def get_os_shard_group() -> dist.ProcessGroup:
    """Return the group whose shards make up the optimizer state: a half, or the data-parallel group."""
    from ascendspeed.core import parallel_state

    half_of_rank = shards.half()
    return half_of_rank.group if half_of_rank else parallel_state.get_data_parallel_group()


def half() -> shards.Half:
    """Return this rank's half of its data-parallel group.

    Raises:
        UnsupportedError: the script has not cut the group.
    """
    half_of_rank = shards.half()
    if half_of_rank is None:
        raise UnsupportedError(
            "build_optimizer_replica_group was not called for the data-parallel group of this rank: "
            "call it in initialize_model_parallel, for each of them, on every rank"
        )
    return half_of_rank
