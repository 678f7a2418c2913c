"""Computes how many ranks and nodes a job can lose without losing a finished step, from all ranks' shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from adaptor.controller.plan import groups_of
from adaptor.protocol.messages import Share

# Steps between two copies in host memory at most, with TTP_HOST_COPY=auto.
MOST_STEPS = 50
# The setting with which a death costs some steps where a shard has one holder alone.
REMEDY = f"TTP_HOST_COPY=auto keeps copies in host memory, from which at most {MOST_STEPS} steps are lost"


def steps_between_copies(host_copy: int | None) -> int:
    """Return the most steps between two copies in host memory; 0: none are made.

    Args:
        host_copy: the value of TTP_HOST_COPY; None: auto, in a job with a lone shard.
    """
    return MOST_STEPS if host_copy is None else host_copy


def alone(copied: int) -> str:
    """Return the faults that a job with a lone shard survives, in words."""
    if copied:
        return f"exceptions are survived; a process that dies costs up to {copied} steps (TTP_HOST_COPY)"
    return "exceptions are survived, the death of a process is not"


def survives(
    kind: str, shares: Mapping[int, Iterable[Share]], node_of: Mapping[int, int], copied: int | None = 0
) -> str:
    """Return the losses that a job survives, in words.

    Args:
        kind: of the replicas, in the user's words.
        shares: the shards of each rank of the job.
        node_of: the node of each rank.
        copied: the most steps between two copies in host memory; 0: none are made; None: the job cannot have
            host copies.
    """
    ranks, has_one_node = spare(shares, lambda rank: rank), len(set(node_of.values())) == 1
    if not ranks and copied:
        node = "" if has_one_node else ", or any 1 node,"
        return (
            f"{kind}; exceptions; ranks that die{node} cost up to {copied} steps, from copies in host memory"
        )
    if not ranks:
        return f"{kind}; {exceptions_alone(has_remedy=copied is not None)}"
    description = f"{kind}; any {ranks} rank{'s' if ranks > 1 else ''}"
    if has_one_node:
        return description
    nodes = spare(shares, node_of.__getitem__)
    return (
        f"{description}, any {nodes} node{'s' if nodes > 1 else ''}"
        if nodes
        else f"{description}, but no whole node"
    )


def exceptions_alone(*, has_remedy: bool) -> str:
    """Return the survivable losses of a job with a lone shard and without host copies, in words."""
    remedy = f"; {REMEDY}" if has_remedy else ""
    return f"exceptions alone: a rank that dies takes the steps since the last save along{remedy}"


def spare(shares: Mapping[int, Iterable[Share]], place_of: Callable[[int], object]) -> int:
    """Return how many places (ranks, nodes or racks) may be lost, in any choice.

    Every shard then still has a holder, and every group a rank that can write the group.
    """
    groups = groups_of(shares).values()
    rank_sets = [ranks for group in groups for ranks in (*group.owners.values(), group.writers)]
    return min((len({place_of(rank) for rank in ranks}) for ranks in rank_sets), default=1) - 1
