"""The memory that host copies take on each node, and whether it is there: checked before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Need(NamedTuple):
    """What the copies of a rank take.

    Attributes:
        node: of the rank.
        size: bytes of its copies, all files together.
        available: bytes that are free on the node.
    """

    node: int
    size: int
    available: int


def bytes_on(needs: Sequence[Need]) -> Mapping[int, int]:
    """Return the bytes that copies take on each node, of its own ranks and of those of the node before."""
    nodes = sorted({need.node for need in needs})
    own = {node: sum(need.size for need in needs if need.node == node) for node in nodes}
    return {node: own[node] + (own[nodes[at - 1]] if len(nodes) > 1 else 0) for at, node in enumerate(nodes)}


def shortage(needs: Sequence[Need], usable: float = 1.0) -> str:
    """Return why copies do not fit into the memory of a node, in words; empty: they fit.

    Args:
        needs: of all ranks, before any of them takes memory for copies.
        usable: the part of the free memory that they may take.
    """
    part = "" if usable == 1.0 else f", of which copies take {usable:.0%} at most"
    for node, size in bytes_on(needs).items():
        free = min(need.available for need in needs if need.node == node)
        if size > free * usable:
            return (
                f"the copies of node {node} take {size} bytes of its memory, and {free} bytes are free"
                f" (limits of its control group included){part}"
            )
    return ""
