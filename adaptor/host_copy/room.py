"""Checks, before the first step, that each node has the memory for its host copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Need(NamedTuple):
    """The memory needed for the copies of a rank.

    Attributes:
        node: of the rank.
        size: bytes of the rank's copies, all files together.
        available: free bytes on the node.
    """

    node: int
    size: int
    available: int


def bytes_on(needs: Sequence[Need]) -> Mapping[int, int]:
    """Return the bytes of copies on each node, of its own ranks and of the previous node's ranks."""
    nodes = sorted({need.node for need in needs})
    own = {node: sum(need.size for need in needs if need.node == node) for node in nodes}
    return {node: own[node] + (own[nodes[at - 1]] if len(nodes) > 1 else 0) for at, node in enumerate(nodes)}


def shortage(needs: Sequence[Need], usable: float = 1.0) -> str:
    """Return why copies do not fit into the memory of a node, in words; empty: the copies fit.

    Args:
        needs: of all ranks, before any rank takes memory for copies.
        usable: the usable part of the free memory.
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
