"""The places of nodes in the rendezvous store: who owns each place, and whether the job goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, Store

from adaptor.errors import StartError
from adaptor.launchers.rendezvous.waiting import PlaceLostError, SilentStoreError, ask, wait_for
from adaptor.launchers.spares.spare_node import GATE, PREFIX
from adaptor.protocol.spare_messages import Gate, TakePlace

# Node 0 has the same verdict at the same time, ends its workers (5 s at most) and asks its spares (3 s for
# each stopped spare).
DECIDED_S = 60.0
# Node 0 opens its gate as soon as it has the controller, to which this node is connected.
OPENED_S = 10.0
_FILLED, _LEFT = "1", "0"


def find_gate(store: Store) -> Gate | None:
    """Return the gate for spare nodes from the store of a round; None if there is no gate."""
    keys = PrefixStore(PREFIX, store)
    with contextlib.suppress(RuntimeError):  # the node of the store is lost
        if keys.check([GATE]) and (encoded := bytes(keys.get(GATE))):
            return msgspec.json.decode(encoded, type=Gate)
    return None


class Places:
    """The places of nodes, in the rendezvous store.

    Args:
        store: lasts as long as the numbers of nodes.
        place: the place that this node has taken as a spare; None: its original place.
    """

    def __init__(self, store: Store, node: int, place: TakePlace | None) -> None:
        self._store = PrefixStore(PREFIX, store)
        self._node = node
        self._place = place

    def announce(self, gate: Gate, term: int) -> None:
        """Let spare nodes, and the other nodes, find the gate at the controller of `term`."""
        encoded = msgspec.json.encode(gate).decode()
        for key in (GATE, f"{GATE}/{term}"):
            self._store.set(key, encoded)

    def close_gate(self) -> None:
        """Let nodes find no gate: they meet the others, which start again."""
        with contextlib.suppress(RuntimeError):  # the node of the store is lost
            self._store.set(GATE, "")

    def gate(self, term: int) -> Gate | None:
        """Return the gate at the controller of `term`, opened at once; None if the store does not answer."""
        key = f"{GATE}/{term}"

        def read() -> bytes:
            self._store.wait([key], timedelta(seconds=OPENED_S))
            return bytes(self._store.get(key))

        try:
            encoded = wait_for(read, lambda: "the gate for spare nodes, at the controller", limit_s=OPENED_S)
        except (RuntimeError, SilentStoreError):  # the node of the store is lost, or does not answer
            return None
        return msgspec.json.decode(encoded, type=Gate)

    def note_start(self) -> None:
        """Note that this node has workers: a later process with its number is a spare node."""
        with contextlib.suppress(RuntimeError):  # the node of the store is lost
            self._store.set(f"started/{self._node}", "")

    def require_first(self) -> None:
        """Check that no process before this one has had the number of this node and workers.

        Such a process is lost, or about to be: the controller gives its place to spare nodes alone.

        Raises:
            PlaceLostError: a process before this one has had workers.
            SilentStoreError: the store does not answer.
        """
        key = f"started/{self._node}"
        if ask(self._store, lambda: self._store.check([key]), lambda: "the owners of places, from node 0"):
            raise PlaceLostError(
                f"the job trains, and has taken node {self._node} for lost: this node waits as a spare node"
            )

    def require_own(self) -> None:
        """Check the owner of the place.

        Raises:
            StartError: another node owns the place.
            SilentStoreError: the store does not answer.
        """
        key = f"owner/{self._node}"

        def read() -> str:
            if self._place is not None:  # node 0 informs the spare before it writes the owner
                self._store.wait([f"taken/{self._place.owner}"])
            return self._store.get(key).decode() if self._store.check([key]) else ""

        owner = ask(self._store, read, lambda: "the owners of places, from node 0")
        if owner != (self._place.owner if self._place is not None else ""):
            raise StartError(f"node {self._node} was taken for lost, and a spare node has its place")

    def give(self, owners: Mapping[int, str]) -> None:
        """Write the new owners of lost nodes' places, on node 0."""
        for node, owner in owners.items():
            self._store.set(f"owner/{node}", owner)
            self._store.set(f"taken/{owner}", "")

    def settle(self, generation: int, owners: Mapping[int, str], *, is_filled: bool | None = None) -> bool:
        """Write the owners of the places lost in `generation`, on node 0; return whether the job goes on.

        Invariant: all nodes have the same answer. A node that has waited in vain has answered for all nodes,
        for instance while the disk of the save folder hung.

        Args:
            owners: empty: no owners.
            is_filled: whether the job is to go on; None: if the places have owners.
        """
        self.give(owners)
        goes_on = bool(owners) if is_filled is None else is_filled
        return self._decide(generation, _FILLED if goes_on else _LEFT)

    def _decide(self, generation: int, answer: str) -> bool:
        """Write the answer unless there is one; return whether the job goes on."""
        return self._store.compare_set(f"filled/{generation}", "", answer) == _FILLED.encode()

    def are_filled(self, generation: int) -> bool:
        """Return whether node 0 has a spare for each place lost in `generation`."""

        def decided() -> bool:
            with contextlib.suppress(RuntimeError):  # node 0 is also lost, or has not decided
                self._store.wait([f"filled/{generation}"], timedelta(seconds=DECIDED_S))
            with contextlib.suppress(RuntimeError):
                return self._decide(generation, _LEFT)
            return False

        try:
            return wait_for(
                decided, lambda: "node 0, which decides whether the job goes on", limit_s=DECIDED_S
            )
        except SilentStoreError:
            return False
