"""The places of nodes with fixed numbers, in the rendezvous store: who owns them, and which are filled.

Node 0 has that store, and decides; the others wait for what it has decided. A job whose store is lost fills
no place.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import PrefixStore, Store

from adaptor.errors import StartError
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.launchers.spares.spare_node import GATE, PREFIX
from adaptor.protocol.spare_node_messages import TakePlace

# Node 0 has the same verdict at the same time, ends its workers (5 s at most) and asks its spares (3 s for
# each that is stopped).
DECIDED_S = 60.0
# Node 0 opens its gate as soon as it has the controller, which this node has reached.
OPENED_S = 10.0
_FILLED, _LEFT = "1", "0"


class Places:
    """The places.

    Args:
        store: the rendezvous store.
        node: this one.
        place: that this node has taken as a spare; None: it began there.
    """

    def __init__(self, store: Store, node: int, place: TakePlace | None) -> None:
        self._store = PrefixStore(PREFIX, store)
        self._node = node
        self._place = place

    def announce(self, invitation: bytes) -> None:
        """Let spare nodes find the gate."""
        self._store.set(GATE, invitation.decode())

    def gate(self) -> bytes:
        """Return the invitation to the gate, which node 0 opens with its first workers; empty: it has not."""
        try:
            self._store.wait([GATE], timedelta(seconds=OPENED_S))
            return bytes(self._store.get(GATE))
        except RuntimeError:  # node 0 is lost, or does not answer
            return b""

    def require_own(self) -> None:
        """Raises StartError if this place was given to another node."""
        key = f"owner/{self._node}"
        if self._place is not None:  # node 0 tells the spare first, and then writes down that it has
            self._store.wait([f"taken/{self._place.owner}"])
        owner = self._store.get(key).decode() if self._store.check([key]) else ""
        if owner != (self._place.owner if self._place is not None else ""):
            raise StartError(f"node {self._node} was taken for lost, and a spare node has its place")

    def give(self, owners: Mapping[int, str]) -> None:
        """Write down, on node 0, who has places of lost nodes from now on."""
        for node, owner in owners.items():
            self._store.set(f"owner/{node}", owner)
            self._store.set(f"taken/{owner}", "")

    def settle(self, generation: int, owners: Mapping[int, str]) -> None:
        """Write down, on node 0, who has the places that were lost in `generation`; empty: nobody."""
        self.give(owners)
        self._store.set(f"filled/{generation}", _FILLED if owners else _LEFT)

    def are_filled(self, generation: int) -> bool:
        """Return whether node 0 has found a spare for each place that was lost in `generation`."""
        key = f"filled/{generation}"

        def decided() -> bool:
            try:
                self._store.wait([key], timedelta(seconds=DECIDED_S))
                return bool(self._store.get(key).decode() == _FILLED)
            except RuntimeError:  # node 0 is lost, too, or does not answer
                return False

        return wait_for(decided, lambda: "node 0, which asks for spare nodes")
