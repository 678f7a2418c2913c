"""The tolerated losses are computed from the holders of the shards."""

from __future__ import annotations

import pytest

from adaptor.protocol.messages import Share
from adaptor.replica import tolerance


def _shares(*held_by_rank: tuple[int, ...], count: int) -> dict[int, list[Share]]:
    """Return, by rank, the held shards of one group."""
    return {
        rank: [Share("g", index, count) for index in indices] for rank, indices in enumerate(held_by_rank)
    }


@pytest.mark.parametrize(
    ("shares", "nodes", "expected"),
    [
        (_shares((0,), (1,), (0,), (1,), count=2), (0, 0, 0, 0), "any 1 rank"),
        (_shares((0,), (1,), (0,), (1,), count=2), (0, 0, 1, 1), "any 1 rank, any 1 node"),
        (_shares((0,), (1,), (0,), (1,), count=2), (0, 1, 0, 1), "any 1 rank, but no whole node"),
        (_shares((0, 1), (1, 2), (2, 0), count=3), (0, 0, 1), "any 1 rank, but no whole node"),
        (_shares((0, 1), (1, 2), (2, 0), count=3), (0, 1, 2), "any 1 rank, any 1 node"),
        (_shares((0,), (0,), (0,), (0,), count=1), (0, 1, 2, 3), "any 3 ranks, any 3 nodes"),
    ],
    ids=["one node", "a half on each", "halves across nodes", "mirror", "mirror apart", "whole copies"],
)
@pytest.mark.robustness(
    "A1", "the user wants to know what the job survives", "computed from who holds what, not a constant text"
)
def test_the_ranks_and_nodes_that_may_be_lost(
    shares: dict[int, list[Share]], nodes: tuple[int, ...], expected: str
) -> None:
    assert tolerance.survives("kind", shares, dict(enumerate(nodes))) == f"kind; {expected}"


@pytest.mark.parametrize(
    "shares",
    [
        _shares((0,), (1,), (0,), count=2),
        {
            0: [Share("a", 0, 1)],
            1: [Share("a", 0, 1), Share("b", 0, 1)],
            2: [Share("b", 0, 1, can_write=False)],
        },
    ],
    ids=["one shard is on one rank alone", "one rank alone can write a group"],
)
def test_no_rank_may_be_lost_without_a_second_copy(shares: dict[int, list[Share]]) -> None:
    nodes = {0: 0, 1: 1, 2: 2}
    alone = "mirror; exceptions alone: a rank that dies takes the steps since the last save along"
    remedy = "TTP_HOST_COPY=auto keeps copies in host memory, from which at most 50 steps are lost"
    assert tolerance.survives("mirror", shares, nodes) == f"{alone}; {remedy}"
    assert tolerance.survives("mirror", shares, nodes, copied=None) == alone, "no remedy for this job"
    expected = "mirror; exceptions; ranks that die{} cost up to 5 steps, from copies in host memory"
    several = expected.format(", or any 1 node,")
    assert tolerance.survives("mirror", shares, nodes, copied=5) == several
    assert tolerance.survives("mirror", shares, dict.fromkeys(shares, 0), copied=5) == expected.format("")
