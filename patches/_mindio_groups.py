"""The groups of `mindio_ttp.modellink`, for a ModelLink (af1347) that was edited after the guide.

Apart from the optimizer, because the framework imports them before its own optimizer is there.
"""

from __future__ import annotations

import torch.distributed as dist

from adaptor.errors import LayoutError
from adaptor.patches import _ascendspeed_shards as shards

_data_parallel: list[int] = []


def build_optimizer_replica_group(ranks: list[int]) -> None:
    """Cut a data-parallel group; for each of them, on every rank."""
    if len(ranks) % shards.HALVES:
        raise LayoutError(
            f"build_optimizer_replica_group: {len(ranks)} data-parallel ranks cannot be cut in two: "
            "use an even number; for an odd one leave the call out, and take TTPOddReplicaOptimizer"
        )
    shards.cut_one(tuple(ranks))
    if dist.get_rank() in ranks:
        _data_parallel[:] = ranks


def get_dp_rank_list() -> list[int]:
    """The data-parallel ranks of this rank."""
    return list(_data_parallel)


def get_os_shard_group() -> dist.ProcessGroup:
    """Of the ranks whose shards make up the optimizer state: the data-parallel group, where it is not cut."""
    from ascendspeed.core import parallel_state

    made = shards.half()
    return made.group if made else parallel_state.get_data_parallel_group()


def half() -> shards.Half:
    """Of this rank's data-parallel group."""
    made = shards.half()
    if made is None:
        raise LayoutError(
            "build_optimizer_replica_group was not called for the data-parallel group of this rank: "
            "call it in initialize_model_parallel, for each of them, on every rank"
        )
    return made
