"""Spare nodes and their gate: `spare_gate` and `spare_node` without sockets.

The real `fill_for_restart` and `fill_online` choose the spare node for a place, and the messages to the
controller.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from adaptor.launchers.spares.spare_gate import ANSWER_S, JoinedTraining, StartCounts, answering_spares
from adaptor.launchers.spares.spare_node import TURN_S
from adaptor.protocol.messages import AgentHello
from adaptor.protocol.spare_messages import TakePlace
from tests.simulation.clock import Body, Pause, Process
from tests.simulation.network import Connection, Lost

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.world import World

# The first machine of a spare node; machines of nodes have smaller numbers.
FIRST_MACHINE = 10


class SpareNode(Process):
    """A process of `ttprun --ttp-spare`, which outlives generations.

    Attributes:
        place: the ordered place.
        agent: the agent in the present generation, once the process has begun as a node.
    """

    def __init__(self, world: World, machine: int) -> None:
        super().__init__(world.clock)
        self.world = world
        self.machine = machine
        self.place: TakePlace | None = None
        self.agent: Agent | None = None

    def receive(self, connection: Connection, order: TakePlace | Lost) -> None:
        if isinstance(order, Lost):
            if self.agent is None and (self.place is None or self.place.incident):
                self.place = None
                self.thread(self._go_to_next_gate())
            return
        self.place = order
        self.world.tell(f"-- machine {self.machine} takes the place of node {order.node}")
        self.world.faults.on_spare(self, "given")
        if order.incident:
            draw = self.world.random
            self.later(draw.uniform(0.05, 8.0 if draw.random() < 0.1 else 1.0), self._begin, order)

    def _go_to_next_gate(self) -> Body[None]:
        """Wait at the gate of a later controller, or end: the controller is lost, or cannot be reached."""
        world = self.world
        deadline = world.clock.now + TURN_S
        while world.clock.now < deadline:
            for gate in reversed(world.gates.values()):
                if not world.network.apart(self.machine, gate.machine) and gate.serves:
                    gate.admit(self)
                    return
            yield 0.1
        self.end()

    def _begin(self, place: TakePlace) -> None:
        """Connect to the controller, after torch has been imported."""
        world = self.world
        if self.place is not place:  # lost with the gate
            return
        if place.generations + 1 != world.number:
            self.end()  # all others have restarted without it
            return
        self.agent = world.begin_spare(self)

    def end(self, *, noticed: bool = True) -> None:
        if not self.alive:
            return
        self.alive = False
        if self.agent is not None:
            self.world.end_agent(self.agent, noticed=noticed)
        else:
            self.world.network.close(self.machine)


class SpareGate:
    """The gate in an agent with a controller; the gate of node 0 exists through all generations.

    Attributes:
        machine: of the agent.
        places_given: the number of places given so far.
        waiting: the waiting spare nodes.
        owners: the owner of each given place.
        store: the rendezvous store, which stays.
        gone: the hello of each node whose spare process ended after the grant of the place.
    """

    def __init__(self, world: World, machine: int) -> None:
        self._world = world
        self.machine = machine
        self.places_given = 0
        self.store = None
        self.waiting: list[SpareNode] = []
        self.owners: dict[int, SpareNode] = {}
        self.gone: dict[int, AgentHello] = {}
        self._connections: dict[int, Connection] = {}

    def begin(self, world: World) -> None:
        """Begin a generation with a new network, in which living spare nodes are connected again."""
        self._world = world
        self.gone = {node: hello for node, hello in self.gone.items() if not self._has_owner(node)}
        self.waiting = [spare for spare in self.waiting if spare.alive]
        for spare in (*self.waiting, *self.owners.values()):
            spare.world, spare.agent = world, None
            if not spare.alive:
                world.network.closed.add(spare.machine)
            self._connections[spare.machine] = world.network.wait_at(self, spare)

    def _has_owner(self, node: int) -> bool:
        return node in self.owners and self.owners[node].alive

    @property
    def agent(self) -> Agent:
        return self._world.machines[self.machine]

    @property
    def serves(self) -> bool:
        """Return whether the agent lives and answers."""
        return self.machine not in self._world.network.closed and not self.agent.stopped

    def admit(self, spare: SpareNode) -> None:
        """Let a spare node wait that has lost an earlier controller, and its place with it."""
        for gate in self._world.gates.values():
            gate.owners = {node: owner for node, owner in gate.owners.items() if owner is not spare}
        self._world.tell(f"-- machine {spare.machine} waits at machine {self.machine}")
        self.waiting.append(spare)
        self._connections[spare.machine] = self._world.network.wait_at(self, spare)

    def on_connection_lost(self, connection: Connection, message: Lost) -> None:
        """Notice that a connection has ended."""
        for spare in self.waiting:
            if spare.machine == connection.machine:
                self.waiting.remove(spare)
                return
        for node, spare in self.owners.items():
            if spare.machine == connection.machine:
                self.gone[node] = AgentHello(node, self._world.agents[node].ranks)
                self.agent.do(self.agent.lose_absent)

    async def await_spares(self, count: int, limit_s: float) -> None:
        """Wait for `count` spare nodes, as the real gate does."""
        clock = self._world.clock
        deadline = clock.now + limit_s
        while len(self.waiting) < count and clock.now < deadline:
            await Pause(0.05)

    async def fill(
        self,
        lost: Mapping[int, tuple[int, ...]],
        counts: StartCounts,
        incident: int = 0,
        refuses: Callable[[], Awaitable[str]] | None = None,
        joined: JoinedTraining | None = None,
    ) -> dict[int, str]:
        """Give all places to spare nodes that have just answered, or no place at all."""
        ready = await answering_spares(self.waiting, len(lost), self._answers)
        if len(ready) < len(lost) or (refuses is not None and await refuses()):
            return {}
        owners = {}
        for node, spare in zip(lost, ready, strict=True):
            self.places_given += 1
            owners[node] = f"owner {self.places_given} of machine {self.machine}"
            self.waiting.remove(spare)
            self.owners[node] = spare
            self.gone.pop(node, None)
            place = TakePlace(node, counts.restarts, counts.generations, owners[node], incident)
            if joined is not None:
                place = msgspec.structs.replace(place, controller=joined.controller, term=joined.term)
            self._connections[spare.machine].down.send(place)
        return owners

    async def _answers(self, spare: SpareNode) -> bool:
        network = self._world.network
        if not self._can_answer(spare):
            await Pause(ANSWER_S)
            return False
        await Pause(network.delay() + network.delay())
        return self._can_answer(spare) and not network.apart(spare.machine, self.machine)

    def _can_answer(self, spare: SpareNode) -> bool:
        is_apart = self._world.network.apart(spare.machine, self.machine)
        return spare.alive and not spare.stopped and not is_apart
