"""A simulated `ControllerHost` without sockets, around the real controller of one term."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from adaptor.controller.controller import Controller
from adaptor.controller.failover import StandbyReplicator
from adaptor.controller.incident_state import Orders
from adaptor.launchers.control.controller_host import TICK_S, AgentRegistry
from adaptor.protocol.messages import (
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Dismissed,
    Endpoint,
    FromAgent,
    ToController,
    Welcome,
)
from tests.simulation.clock import Pause
from tests.simulation.invariants import Watch

if TYPE_CHECKING:
    from tests.simulation.controller_client import Follower
    from tests.simulation.network import Connection


class ControllerHost:
    """A controller in `agent`; the real `AgentRegistry` accepts or rejects messages.

    Attributes:
        connections: by node, the connection of each present node; None: the host's own agent.
    """

    def __init__(self, agent: Follower) -> None:
        self.world = world = agent.world
        self.agent = agent
        self.term, self.home = agent.succession.term, agent.node
        self.nodes = len(world.agents)
        self.controller = Controller(
            len(world.job.nodes),
            world.timeout_s,
            ("store", self.term, b""),
            term=self.term,
            online_s=world.online_s,
            home=self.home,
        )
        self.replicator = StandbyReplicator(self.home)
        members = self.controller.membership
        self.registry = AgentRegistry(len(world.job.nodes), len(world.agents), members.lost, members.expected)
        self.connections: dict[int, Connection | None] = {}
        self._served: set[Connection | None] = set()  # open connections whose hello was accepted
        self.left = False
        self.watch = Watch(world, self)
        self._ticking = False

    def succeed(self) -> None:
        """Take over from the controllers of earlier terms."""
        world, agent = self.world, self.agent
        world.tell(f"-- node {self.home} takes over, term {self.term}")
        lost, known_messages = agent.succession.lost_homes, agent.succession.standby_state
        nodes = [node for node in range(self.nodes) if node not in lost]
        self.registry.succeed(known_messages)
        self.replicator.succeed(known_messages)
        store = Endpoint("next", agent.machine)
        self.controller.succeed(known_messages, nodes, world.clock.now, store)
        agent.say_again()
        for node in lost:
            self._handle(AgentLost(node))
        world.faults.on_state("TAKING OVER")

    def leave(self) -> None:
        """Notice the end of the host's agent."""
        if self.controller.incident is None and self.controller.verdict is None:
            for node in self.connections:
                if node != self.home:
                    self.say(node, Dismissed())
        self.left = True

    def receive(self, node: int, message: FromAgent, connection: Connection | None = None) -> None:
        """Receive a message over `connection`, or from this node's own agent (None)."""
        if self.left or not (isinstance(message, AgentHello) or connection in self._served):
            return
        if reason := self.registry.rejection_reason(node, message):
            self.world.tell(f"term {self.term} rejects node {node}, which {reason}: {message}")
            if isinstance(message, AgentHello):
                assert connection is not None
                self.world.network.hang_up(connection)
            return
        if isinstance(message, AgentHello):
            self._served.add(connection)
            self.connections[node] = connection
            self.say(node, Welcome())
            if connection is not None:
                self.world.moves_in(self.world.machines[connection.machine], self)
        self._handle(message)

    def lose(self, node: int, connection: Connection) -> None:
        """Notice that a connection has ended."""
        if connection in self._served:
            self._served.discard(connection)
            self._lose(node)

    async def until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_done`, as the real host does."""
        clock = self.world.clock
        deadline = clock.now + limit_s
        while not is_done() and clock.now < deadline:
            await Pause(0.01)

    def _lose(self, node: int) -> None:
        self.connections.pop(node, None)
        self._handle(AgentLost(node))

    def lose_absent(self, hello: AgentHello) -> None:
        """Notice the end of a node before its connection, as the real host does."""
        if self.left:
            return
        if hello.node in self.controller.membership.expected:
            self._lose(hello.node)
        elif not self.registry.is_here(hello.node):
            assert not self.registry.rejection_reason(hello.node, hello)
            self._handle(hello)
            self._lose(hello.node)

    def _handle(self, message: ToController) -> None:
        if self.left:
            return
        if self.world.log is not None:
            self.world.tell(f"term {self.term} heard {message}")
        self.watch.on_message(message)
        for node, order in self.replicator.replicate(message):
            self.say(node, order)
        self._obey(self.controller.handle(message, self.world.clock.now))
        if not self._ticking:
            self._ticking = True
            self.agent.later(TICK_S, self._tick)

    def _tick(self) -> None:
        if self.left or self.controller.verdict is not None:
            return
        self._obey(self.controller.tick(self.world.clock.now))
        self.agent.later(TICK_S, self._tick)

    def _obey(self, orders: Orders) -> None:
        for node, order in orders:
            if self.world.log is not None:
                self.world.tell(f"    term {self.term} orders node {node}: {order}")
            self.watch.on_order(node, order)
            self.say(node, order)
        self.watch.after_decision()
        incident = self.controller.incident
        if incident is not None:
            self.world.faults.on_state(incident.state.stage.name)
            if incident.regrouping.is_pending:
                self.world.faults.on_regrouping()

    def say(self, node: int, order: ControllerToAgent) -> None:
        if node == self.home:
            self.agent.later(0.0, self.agent.accept, order)
        elif self.connections.get(node) is not None:
            self.connections[node].down.send(order)  # type: ignore[union-attr]
