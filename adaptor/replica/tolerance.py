"""Computes how many ranks and nodes a job can lose without losing a finished step, from all ranks' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from adaptor.controller.plan import groups_of
from adaptor.protocol.messages import Share


def survives(kind: str, shares: Mapping[int, Iterable[Share]], node_of: Mapping[int, int]) -> str:
    """Return what may be lost, in words.

    Args:
        kind: of the replicas, as the user knows them.
        shares: what each rank of the job holds.
        node_of: the node of each rank.
    """
    ranks = spare(shares, lambda rank: rank)
    if not ranks:
        return f"{kind}; exceptions alone: a rank that dies takes the steps since the last save along"
    words = f"{kind}; any {ranks} rank{'s' if ranks > 1 else ''}"
    if len(set(node_of.values())) == 1:
        return words
    nodes = spare(shares, node_of.__getitem__)
    return f"{words}, any {nodes} node{'s' if nodes > 1 else ''}" if nodes else f"{words}, but no whole node"


def spare(shares: Mapping[int, Iterable[Share]], place_of: Callable[[int], object]) -> int:
    """Return how many places (ranks, nodes or racks) may be lost, whichever they are.

    Every shard then still has a holder, and every group a rank that can write it.
    """
    groups = groups_of(shares).values()
    needed = [ranks for group in groups for ranks in (*group.owners.values(), group.writers)]
    return min((len({place_of(rank) for rank in ranks}) for ranks in needed), default=1) - 1
