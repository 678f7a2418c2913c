"""Spare nodes, and the gate at which they wait: `spare_gate` and `spare_node` without sockets.

The real `fill_for_restart` and `fill_online` decide which spare node gets a place, and what the controller is
told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TYPE_CHECKING

from adaptor.launchers.spares.spare_gate import ANSWER_S, JoinedTraining, StartCounts, answering_spares
from adaptor.protocol.messages import AgentHello
from adaptor.protocol.spare_messages import TakePlace
from tests.simulation.clock import Process
from tests.simulation.network import Connection, Lost

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.world import World

# The first machine of a spare node; machines of nodes have smaller numbers.
FIRST_MACHINE = 10


class Pause:
    """What a coroutine awaits in the simulation: a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


class SpareNode(Process):
    """A process of `ttprun --ttp-spare`, which outlives generations.

    Attributes:
        place: the place that it was ordered to take.
        agent: its agent in this generation, once it has begun as a node.
    """

    def __init__(self, world: World, machine: int) -> None:
        super().__init__(world.clock)
        self.world = world
        self.machine = machine
        self.place: TakePlace | None = None
        self.agent: Agent | None = None

    def receive(self, connection: Connection, order: TakePlace | Lost) -> None:
        if isinstance(order, Lost):
            # A waiting spare node ends: node 0 is lost, or cannot be reached.
            if self.place is None and self.agent is None:
                self.end()
            return
        self.place = order
        self.world.tell(f"-- machine {self.machine} takes the place of node {order.node}")
        self.world.faults.on_spare(self, "given")
        if order.incident:
            draw = self.world.random
            self.later(draw.uniform(0.05, 8.0 if draw.random() < 0.1 else 1.0), self._begin, order)

    def _begin(self, place: TakePlace) -> None:
        """Connect to the controller, after torch has been imported."""
        world = self.world
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
    """The gate in the agent of node 0, which exists as long as the agent, through all generations.

    Attributes:
        places_given: the number of places given so far.
        waiting: the waiting spare nodes.
        owners: the owner of each place that was given.
        store: the rendezvous store, which stays.
        gone: the hello of each node whose spare process ended after it got the place.
    """

    def __init__(self, world: World, spares: list[SpareNode]) -> None:
        self._world = world
        self.places_given = 0
        self.store = None
        self.waiting = spares
        self.owners: dict[int, SpareNode] = {}
        self.gone: dict[int, AgentHello] = {}
        self._connections: dict[int, Connection] = {}
        self._on_gone: Callable[[], None] = lambda: None

    def begin(self, world: World, on_gone: Callable[[], None]) -> None:
        """Begin a generation with a new network, in which living spare nodes are connected again."""
        self._world, self._on_gone = world, on_gone
        self.gone = {node: hello for node, hello in self.gone.items() if not self.owners[node].alive}
        self.waiting = [spare for spare in self.waiting if spare.alive]
        for spare in (*self.waiting, *self.owners.values()):
            spare.world, spare.agent = world, None
            if not spare.alive:
                world.network.closed.add(spare.machine)
            self._connections[spare.machine] = world.network.wait_at(self, spare)

    def on_connection_lost(self, connection: Connection, message: Lost) -> None:
        """Notice that a connection has ended."""
        for spare in self.waiting:
            if spare.machine == connection.machine:
                self.waiting.remove(spare)
                return
        for node, spare in self.owners.items():
            if spare.machine == connection.machine:
                self.gone[node] = AgentHello(node, self._world.agents[node].ranks)
                self._on_gone()

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
            owners[node] = f"owner {self.places_given}"
            self.waiting.remove(spare)
            self.owners[node] = spare
            self.gone.pop(node, None)
            place = TakePlace(node, counts.restarts, counts.generations, owners[node], incident)
            self._connections[spare.machine].down.send(place)
        return owners

    async def _answers(self, spare: SpareNode) -> bool:
        network, machine = self._world.network, self._world.agents[0].machine
        if not self._can_answer(spare):
            await Pause(ANSWER_S)
            return False
        await Pause(network.delay() + network.delay())
        return self._can_answer(spare) and not network.apart(spare.machine, machine)

    def _can_answer(self, spare: SpareNode) -> bool:
        machine = self._world.agents[0].machine
        return spare.alive and not spare.stopped and not self._world.network.apart(spare.machine, machine)
