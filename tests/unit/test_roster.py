"""The advice of the last line for a shard without a live holder: nothing already done."""

from __future__ import annotations

import pytest

from adaptor.controller.membership import Membership
from adaptor.protocol.messages import Layout, Share

AUTO = "a second copy of each shard (TTP_REPLICA=auto)"
EXPERTS = "a smaller --expert-model-parallel-size, with which other ranks have the same experts"
LARGER = "a larger data-parallel size"
NODES = "second copies of each shard on other nodes, more frequent saves"


def _own(index: int, count: int, group: str = "g") -> Share:
    return Share(group, index, count)


def _given(index: int, count: int, group: str) -> Share:
    return Share(group, index, count, can_write=False)


# Two ranks with different experts: group a belongs to rank 0, b to rank 1; shards 0 and 1 are the dense
# shards, shard 2 holds the experts.
EXPERTS_ALONE = (
    [_own(0, 3, "a"), _given(0, 3, "b"), _own(2, 3, "a")],
    [_own(1, 3, "b"), _given(1, 3, "a"), _own(2, 3, "b")],
)
MIRRORED = (
    [*EXPERTS_ALONE[0], _own(1, 3, "a"), _given(1, 3, "b")],
    [*EXPERTS_ALONE[1], _own(0, 3, "b"), _given(0, 3, "a")],
)


@pytest.mark.robustness(
    "B9", "a shard is lost with TTP_REPLICA=auto", "the last line advises what was not done"
)
@pytest.mark.parametrize(
    ("ranks", "helps"),
    [
        ([[_own(0, 2)], [_own(1, 2)]], AUTO),
        ([[_own(0, 1)]], LARGER),
        ([[_own(0, 1, "mp_rank_00")], [_own(0, 1, "mp_rank_01")]], LARGER),
        ([[_own(0, 1)], [_own(0, 1)]], NODES),
        (EXPERTS_ALONE, f"{AUTO} and {EXPERTS}"),
        (MIRRORED, EXPERTS),
    ],
    ids=["none", "one rank", "one rank of each part", "whole", "experts, none", "experts, mirror"],
)
def test_advice(ranks: list[list[Share]], helps: str) -> None:
    membership = Membership(len(ranks))
    for rank, shares in enumerate(ranks):
        membership.add(Layout(rank, tuple(shares), "/save", 0, ""))
    copies = "copies in host memory"
    assert membership.advice == f"{helps}, or {copies} (TTP_HOST_COPY), would have helped"
    membership.add(Layout(0, tuple(ranks[0]), "/save", 0, "", copied=10))
    assert membership.advice == f"{copies}, made at least every 10 steps, may have an earlier step"
