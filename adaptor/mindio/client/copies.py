"""The holders of shards, in the words of the SDK; pure.

It knows lists of ranks: those of `rank_list` are cut into `replica_cnt` runs of the same length, and the i-th
ranks of all runs hold the same shard. A rank has a place in one such list (two with experts), so it can hold
one shard of an optimizer, not two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from adaptor.errors import UnsupportedError
from adaptor.protocol.messages import GroupOrder, Share


def replica_info(rank: int, shares_by_rank: Sequence[Sequence[Share]]) -> list[dict[str, Any]]:
    """Return the argument that `rank` gives to tft_set_optimizer_replica.

    Args:
        shares_by_rank: per rank of the job what it holds.

    Raises:
        UnsupportedError: the SDK has no words for it.
    """
    for holder_rank, shares in enumerate(shares_by_rank):
        if len(shares) != 1:
            raise UnsupportedError(
                f"TTP_ENGINE is 'mindio', but rank {holder_rank} holds {len(shares)} shards: mindio_ttp "
                "knows of one "
                "per rank; use TTP_REPLICA=split, and no experts, or leave TTP_ENGINE out"
            )
    (own_share,) = shares_by_rank[rank]
    holders = [
        [
            holder_rank
            for holder_rank, (share,) in enumerate(shares_by_rank)
            if (share.group, share.index) == (own_share.group, index)
        ]
        for index in range(own_share.count)
    ]
    count = len(holders[0])
    if not all(len(ranks) == count for ranks in holders):
        sizes = ", ".join(str(len(ranks)) for ranks in holders)
        raise UnsupportedError(
            f"TTP_ENGINE is 'mindio', but the shards of {own_share.group} have {sizes} holders: mindio_ttp "
            "needs "
            "as many for each"
        )
    ranks = [ranks[copy] for copy in range(count) for ranks in holders]
    return [{"rank_list": ranks, "replica_cnt": count, "replica_shift": own_share.count}]


def order(group: str, infos: Sequence[dict[str, Any]]) -> GroupOrder:
    """Return the order for a rank of `group` from a save handler's arguments: the i-th rank gives shard i."""
    (info,) = infos
    ranks = tuple(info["ranks"])
    return GroupOrder(group, ranks, ranks[0])
