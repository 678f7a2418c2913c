"""Gives the places of lost nodes to spare nodes, on the control thread of node 0 (the gate: `spare_gate.py`).

A place is given either for the restart of all workers that follows a verdict, or online, while the other
nodes keep their workers. Online, the spare node is a node of the job from then on: if a verdict comes before
its agent has connected, node 0 waits for that agent, which gets the verdict and starts again with all others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from adaptor.controller.membership import Membership
from adaptor.launchers.agent.start_counts import StartCounts
from adaptor.launchers.spares.spare_gate import SpareGate
from adaptor.protocol.messages import FillPlaces, PlacesFilled

# How long an agent may take that was told to take a place, until the controller hears of it: it starts torch
# elastic, which is a matter of seconds. The other nodes wait for longer (`places.DECIDED_S`).
COMES_S = 20.0
_NONE_WAITS = "no spare node waits"


async def fill_for_restart(
    gate: SpareGate,
    members: Membership,
    lost: Sequence[int],
    counts: StartCounts,
    until: Callable[[Callable[[], bool], float], Awaitable[None]],
) -> dict[int, str]:
    """Give the places of `lost` nodes for the restart that follows; return the owners, {} if one has none.

    Args:
        gate: where spare nodes wait.
        members: of the generation that has ended.
        lost: the nodes that its verdict names.
        counts: `restarts` includes the restart that follows, `generations` does not.
        until: as `ControllerHost.until`, of the controller that knows the members.
    """
    # The controller ends with this generation: who comes later finds nobody, and is of no use.
    await until(lambda: members.expected.keys() <= members.late, COMES_S)
    for node in members.expected.keys() - members.late:
        del members.expected[node]
    coming = {node: owner for node, owner in members.expected.items() if node in lost}
    empty = {node: members.ranks_of(node) for node in lost if node not in coming}
    owners = await gate.fill(empty, counts)
    return {} if empty and not owners else {**coming, **owners}


async def fill_online(
    gate: SpareGate | None,
    members: Membership,
    order: FillPlaces,
    counts: StartCounts,
    is_wanted: Callable[[], bool],
) -> PlacesFilled:
    """Give the places of an order while the other nodes keep their workers.

    Args:
        gate: where spare nodes wait; None: the job has no gate.
        members: of this generation.
        order: of the controller.
        counts: of this generation.
        is_wanted: is asked when spare nodes have answered: whether the places are still to be filled.

    Returns:
        What the controller is to hear.
    """
    owners: dict[int, str] = {}
    if gate is not None:
        places = {node: members.ranks_of(node) for node in order.nodes}
        counts_before = counts._replace(
            generations=counts.generations - 1
        )  # its own start is in this generation
        owners = await gate.fill(places, counts_before, order.incident, is_wanted=is_wanted)
    return PlacesFilled(0, order.incident, order.nodes, owners, "" if owners else _NONE_WAITS)
