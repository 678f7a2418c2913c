"""The places of nodes: who owns each place, and which spare nodes fill the places of lost nodes.

Node 0 decides on its control thread (the gate: `spare_gate.py`) and writes the owners into the rendezvous
store; the other nodes wait for the entries. A place is filled either for the restart after a verdict, or
online, while the other nodes keep their workers. Online, the spare node belongs to the job at once: if a
verdict comes before its agent has connected, node 0 waits for the agent, which gets the verdict and starts
again with all others. After the loss of node 0 the node that has taken the controller over decides, and
writes into its new store.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from adaptor.controller.membership import Membership
from adaptor.errors import StartError
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.launchers.spares.spare_gate import SpareGate, StartCounts
from adaptor.launchers.spares.spare_node import GATE, PREFIX
from adaptor.protocol.messages import FillPlaces, PlacesFilled
from adaptor.protocol.spare_messages import TakePlace

# The time for the agent of a new owner to connect to the controller: the agent starts torch elastic, which
# takes seconds. The other nodes wait longer (`DECIDED_S`).
COMES_S = 20.0
# The time for spare nodes to come to the gate of the node that has taken over: they notice the loss of node 0
# by themselves, as this node has, and the save has taken time, too.
MOVES_S = 5.0
_NONE_WAITS = "no spare node waits"


async def fill_for_restart(
    gate: SpareGate,
    members: Membership,
    lost: Sequence[int],
    counts: StartCounts,
    until: Callable[[Callable[[], bool], float], Awaitable[None]],
) -> dict[int, str]:
    """Give the places of `lost` nodes for the following restart; return the owners, {} if a place stays
    empty.

    Args:
        gate: where spare nodes wait.
        members: of the generation that has ended.
        lost: the nodes named by the verdict.
        counts: `restarts` includes the following restart, `generations` does not.
        until: `ControllerHost.until` of the controller with the members.
    """
    # The controller ends with the generation, so a later agent would find no controller.
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
        is_wanted: called after the answers of spare nodes: whether the places are still to be filled.

    Returns:
        The report to the controller.
    """
    owners: dict[int, str] = {}
    if gate is not None:
        places = {node: members.ranks_of(node) for node in order.nodes}
        counts_before = counts._replace(
            generations=counts.generations - 1
        )  # its own start is in this generation
        owners = await gate.fill(places, counts_before, order.incident, is_wanted=is_wanted)
    return PlacesFilled(0, order.incident, order.nodes, owners, "" if owners else _NONE_WAITS)


# Node 0 has the same verdict at the same time, ends its workers (5 s at most) and asks its spares (3 s for
# each stopped spare).
DECIDED_S = 60.0
# Node 0 opens its gate as soon as it has the controller, to which this node is connected.
OPENED_S = 10.0
_FILLED, _LEFT = "1", "0"


class Places:
    """The places of nodes with fixed numbers, in the rendezvous store.

    Args:
        place: the place that this node has taken as a spare; None: its original place.
    """

    def __init__(self, store: Store, node: int, place: TakePlace | None) -> None:
        self._store = PrefixStore(PREFIX, store)
        self._node = node
        self._place = place

    def announce(self, invitation: str) -> None:
        """Let spare nodes find the gate."""
        self._store.set(GATE, invitation)

    def gate(self) -> bytes:
        """Return the invitation to the gate, which node 0 opens with its first workers; empty without a
        gate.
        """
        try:
            self._store.wait([GATE], timedelta(seconds=OPENED_S))
            return bytes(self._store.get(GATE))
        except RuntimeError:  # node 0 is lost, or does not answer
            return b""

    def require_own(self) -> None:
        """Check the owner of the place. Raises StartError if another node owns the place."""
        key = f"owner/{self._node}"
        if self._place is not None:  # node 0 informs the spare before it writes the owner
            self._store.wait([f"taken/{self._place.owner}"])
        owner = self._store.get(key).decode() if self._store.check([key]) else ""
        if owner != (self._place.owner if self._place is not None else ""):
            raise StartError(f"node {self._node} was taken for lost, and a spare node has its place")

    def give(self, owners: Mapping[int, str]) -> None:
        """Write the new owners of lost nodes' places, on node 0."""
        for node, owner in owners.items():
            self._store.set(f"owner/{node}", owner)
            self._store.set(f"taken/{owner}", "")

    def settle(self, generation: int, owners: Mapping[int, str], *, is_filled: bool | None = None) -> None:
        """Write the owners of the places lost in `generation`, on node 0.

        Args:
            owners: empty: no owners.
            is_filled: whether the job goes on; None: if the places have owners.
        """
        self.give(owners)
        goes_on = bool(owners) if is_filled is None else is_filled
        self._store.set(f"filled/{generation}", _FILLED if goes_on else _LEFT)

    def are_filled(self, generation: int) -> bool:
        """Return whether node 0 has a spare for each place lost in `generation`."""
        key = f"filled/{generation}"

        def decided() -> bool:
            try:
                self._store.wait([key], timedelta(seconds=DECIDED_S))
                return bool(self._store.get(key).decode() == _FILLED)
            except RuntimeError:  # node 0 is also lost, or does not answer
                return False

        return wait_for(decided, lambda: "node 0, which decides whether the job goes on")
