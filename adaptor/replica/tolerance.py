"""Computes how many ranks and nodes a job can lose without losing a finished step, from all ranks' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from adaptor.controller.plan import groups_of
from adaptor.protocol.messages import Share

# The setting with which a death costs some steps where a shard has one holder alone.
REMEDY = "TTP_HOST_COPY=K keeps copies in host memory, from which at most K steps are lost"


def alone(host_copy: int) -> str:
    """Return what a job survives in which a shard has one holder alone, in words.

    Args:
        host_copy: after how many steps copies in host memory are made (TTP_HOST_COPY); 0: never.
    """
    if host_copy:
        return f"exceptions are survived; a process that dies costs up to {host_copy} steps (TTP_HOST_COPY)"
    return "exceptions are survived, the death of a process is not"


def survives(
    kind: str,
    shares: Mapping[int, Iterable[Share]],
    node_of: Mapping[int, int],
    host_copy: int | None = 0,
) -> str:
    """Return what may be lost, in words.

    Args:
        kind: of the replicas, as the user knows them.
        shares: what each rank of the job holds.
        node_of: the node of each rank.
        host_copy: after how many steps copies in host memory are made; 0: never; None: the job cannot have
            such copies.
    """
    ranks = spare(shares, lambda rank: rank)
    if not ranks and host_copy:
        return (
            f"{kind}; exceptions; a rank that dies costs up to {host_copy} steps, from copies in host memory"
        )
    if not ranks:
        remedy = "" if host_copy is None else f"; {REMEDY}"
        return f"{kind}; exceptions alone: a rank that dies takes the steps since the last save along{remedy}"
    description = f"{kind}; any {ranks} rank{'s' if ranks > 1 else ''}"
    if len(set(node_of.values())) == 1:
        return description
    nodes = spare(shares, node_of.__getitem__)
    return (
        f"{description}, any {nodes} node{'s' if nodes > 1 else ''}"
        if nodes
        else f"{description}, but no whole node"
    )


def spare(shares: Mapping[int, Iterable[Share]], place_of: Callable[[int], object]) -> int:
    """Return how many places (ranks, nodes or racks) may be lost, whichever they are.

    Every shard then still has a holder, and every group a rank that can write it.
    """
    groups = groups_of(shares).values()
    rank_sets = [ranks for group in groups for ranks in (*group.owners.values(), group.writers)]
    return min((len({place_of(rank) for rank in ranks}) for ranks in rank_sets), default=1) - 1
