"""The move of a job to a new node 0: the restart after the loss of node 0 and the rendezvous store.

The successor, the agent whose controller has given the verdict, becomes node 0. The verdict has the address
of the new store, opened by the successor when the successor took the controller over. If a spare node has
taken the place of node 0 in the same incident, that is node 0, the verdict has the address of its store, and
the successor keeps its number.

1. With fixed numbers the successor waits for spare nodes: for its former place, if it becomes node 0, and for
   the places of the other lost nodes. All other nodes keep their numbers.
2. Once spare nodes have answered, the successor asks the save folder whether another side of a cut network
   goes on (`lease.go_on_without`).
3. The successor gives the places away, and writes into the store whether the job goes on. All agents obey,
   and meet at the store.

Invariant: of the agents of one generation only agents with the same verdict meet at the new store.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed import Store
from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo

from adaptor import output, text
from adaptor.controller.failover import empty_places_after, may_go_on
from adaptor.launchers.agent.node import Node
from adaptor.launchers.rendezvous.rendezvous_handler import Rendezvous
from adaptor.launchers.rendezvous.waiting import UNMET, wait_for
from adaptor.launchers.spares.places import DECIDED_S, Places
from adaptor.launchers.spares.spare_gate import StartCounts
from adaptor.protocol.messages import Endpoint, Verdict


def enter_nodes(store: Store, spec: Any, numbers: Iterable[int]) -> None:
    """Make torch's entries of nodes in a new store: torch waits for them, and a node may be lost again."""
    for number in numbers:
        role = _RoleInstanceInfo(spec.role, number, spec.local_world_size)
        store.set(f"torchelastic/role_info/{number}", role.serialize().decode())


class Move:
    """The move of one agent, on the main thread, between two generations of workers.

    Args:
        handler: of the lost rendezvous.
        verdict: has the address of the new store.
        worker_group: torch's, of the generation that has ended.
        counts: `restarts` includes the following restart, `generations` does not.
    """

    def __init__(
        self, handler: Rendezvous, node: Node, verdict: Verdict, worker_group: Any, counts: StartCounts
    ) -> None:
        self._handler = handler
        self._node = node
        self._verdict = verdict
        self._group = worker_group
        self._counts = counts
        self._is_successor = node.control.controller_host is not None
        self._number = int(worker_group.group_rank)
        self._has_node_0 = 0 not in verdict.lost  # a spare node
        self._next_number = 0 if self._is_successor and not self._has_node_0 else self._number
        self._is_fixed = handler.get_backend() == "static"

    def decide(self) -> tuple[Places | None, str]:
        """Move to the new store, if the job goes on.

        Returns:
            The places of nodes in the new store; None and the reason if the job ends.
        """
        endpoint = self._verdict.store
        if endpoint is None:
            return None, "no rendezvous store is left"
        if self._number in self._verdict.lost and not self._has_node_0:
            return None, f"node {self._number} was taken for lost"
        if not may_go_on(self._group.group_world_size, self._verdict.lost):
            return None, "less than half of the nodes are left, without node 0"
        given_places = self._node.control.take_given()
        try:
            store = wait_for(
                lambda: self._handler.store_at(endpoint),
                lambda: "the node that takes the place of node 0",
                limit_s=DECIDED_S,  # the nodes that have reached it wait no longer
            )
            places = Places(store, self._next_number, None)
            if self._is_successor:
                if self._has_node_0:  # else all places are as at the beginning
                    places.give(given_places)
                reason = self._lead(endpoint, store, places)
            else:
                reason = self._follow(endpoint, places)
        except (*UNMET, RuntimeError) as error:
            return None, f"the rendezvous store of the node that has taken over is lost ({text.say(error)})"
        if reason:
            return None, reason
        self._node.control.use_store(endpoint)
        if self._is_fixed:
            self._group.spec.master_addr = endpoint.address
            self._group.spec.master_port = endpoint.port
        return places, ""

    def _lead(self, endpoint: Endpoint, store: Store, places: Places) -> str:
        """Decide for all agents; return why the job does not go on, or ""."""
        reason, owners = self._go_on(store, f"{endpoint.address}:{endpoint.port}")
        if not reason:
            self._handler.move(endpoint, self._next_number)
        if not places.settle(self._counts.generations, owners, is_filled=not reason) and not reason:
            return "another node has waited in vain for this node, which takes the place of node 0"
        return reason

    def _follow(self, endpoint: Endpoint, places: Places) -> str:
        """Obey the decision of the successor; return why the job does not go on, or ""."""
        if not places.are_filled(self._counts.generations):
            return "the node that has taken over does not go on"
        self._handler.move(endpoint, self._number)
        return ""

    @property
    def _coming(self) -> set[int]:
        """Return the lost nodes whose places spare nodes have got, and whose agents obey the verdict."""
        host = self._node.control.controller_host
        return set(host.controller.membership.expected) if host is not None and self._has_node_0 else set()

    def _go_on(self, store: Store, address: str) -> tuple[str, dict[int, str]]:
        """Return why the job does not go on, or "", and the new owners of places."""
        control, lost = self._node.control, self._verdict.lost
        empty = lost if self._has_node_0 else empty_places_after(lost, self._number)
        refusal = ""

        async def refuses() -> str:
            nonlocal refusal
            refusal = await control.note_lost(lost, address, leaving=self._next_number != 0)
            return refusal

        def fill() -> dict[int, str]:
            if empty and self._is_fixed:
                return self._node.fill(empty, self._counts, self._verdict.store, refuses)
            control.thread.wait_for(refuses())
            return {}

        if empty and self._is_fixed and not self._node.has_spares(len(set(empty) - self._coming)):
            return f"no spare node takes the place of node {lost[0]}", {}
        owners = wait_for(fill, lambda: f"spare nodes, and the save folder {self._verdict.save_folder}")
        if empty and self._is_fixed and not owners:
            refusal = refusal or f"no spare node takes the place of node {lost[0]}"
        if refusal:
            return refusal, {}
        enter_nodes(store, self._group.spec, owners)
        if not self._has_node_0:
            output.tell(f"[ttp] this node was node {self._number}, and is node 0 from now on")
        return "", owners
