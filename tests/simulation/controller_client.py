"""A simulated agent's connection to the controller: a real `Succession`, without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptor.controller.failover import Succession
from adaptor.launchers.control.controller_client import PATIENCE_S
from adaptor.protocol.messages import AgentHello, ControllerToAgent, FromAgent
from tests.simulation.clock import Body, Process
from tests.simulation.controller_host import ControllerHost
from tests.simulation.network import Connection, Lost

if TYPE_CHECKING:
    from tests.simulation.world import World


class Follower(Process):
    """An agent's side of control: follows one controller after the other, or hosts the controller.

    Attributes:
        controller_host: the host of the controller, if on the same agent.
        connection: the connection to the controller on another node.
        resting: whether the loss of the controller does not matter any more.
    """

    def __init__(self, world: World, node: int, machine: int, term: int = 0) -> None:
        super().__init__(world.clock)
        self.world = world
        self.node = node
        self.machine = machine
        self.controller_host: ControllerHost | None = None
        self.connection: Connection | None = None
        self.succession = Succession(node, len(set(world.job.nodes)), term)
        self._my_turn = False
        self._silent_since = -1.0  # since when a connected listener has not answered
        self._waiting: list[tuple[Connection, FromAgent | Lost]] = []

    def obey(self, order: ControllerToAgent) -> None:
        raise NotImplementedError

    def meet(self) -> None:
        """Let workers start: the agent knows the standby endpoints, or will not learn them."""
        raise NotImplementedError

    def on_controller_unreachable(self) -> None:
        """Act on the loss of the last controller."""
        raise NotImplementedError

    @property
    def resting(self) -> bool:
        raise NotImplementedError

    def say(self, message: FromAgent) -> None:
        self.succession.keep(message)
        self._say(message)

    def say_first(self, hello: AgentHello) -> None:
        """Send the hello, then messages about workers that ended before their agent began."""
        early, self.succession.said = self.succession.said, []
        for message in (hello, *early):
            self.say(message)

    def _say(self, message: FromAgent) -> None:
        if self.controller_host is not None:
            self.controller_host.receive(self.node, message)
        elif self.connection is not None:
            self.connection.up.send(message)

    def have_the_controller(self) -> ControllerHost:
        self._my_turn = True
        self.controller_host = self.world.hubs[self.succession.term, self.machine] = ControllerHost(self)
        return self.controller_host

    def at_the_gate(self, connection: Connection, message: FromAgent | Lost) -> None:
        """Receive a message of another node's agent; keep the message until this node has the controller."""
        if not self._my_turn:
            self._waiting.append((connection, message))
        elif self.controller_host is None:
            if isinstance(message, AgentHello) and self.succession.verdict is not None:
                connection.down.send(self.succession.verdict)
        elif isinstance(message, Lost):
            self.controller_host.lose(connection.node, connection)
        else:
            self.controller_host.receive(connection.node, message, connection)

    def receive(self, connection: Connection, order: ControllerToAgent | Lost) -> None:
        if connection is not self.connection:
            return
        if not isinstance(order, Lost):
            self._silent_since = -1.0
            self.accept(order)
            return
        self.connection = None
        self.meet()
        if not self.resting:
            self.thread(self._next())

    def accept(self, order: ControllerToAgent) -> None:
        if self.succession.accept(order):
            self.obey(order)
        if self.succession.knows_standby_endpoints:
            self.meet()

    def _next(self) -> Body[None]:
        while self.succession.go_on():
            if self.succession.is_mine:
                self._take_the_place()
                return
            assert self.succession.endpoint is not None
            connection = yield from self.world.network.reach(self, self.succession.endpoint.port)
            if connection is not None and not self.resting:
                self.connection = connection
                self._silent_since = self.clock.now
                self.say_again()
                self.later(PATIENCE_S, self._lose_patience, connection)
                return
        self.on_controller_unreachable()

    def _lose_patience(self, connection: Connection) -> None:
        if connection is self.connection and self._silent_since >= 0:
            connection.up.send(Lost())
            self.receive(connection, Lost())

    def _take_the_place(self) -> None:
        if self.succession.verdict is None:
            self.have_the_controller().succeed()
            self.world.open_gate(self)
        self._my_turn = True
        waiting, self._waiting = self._waiting, []
        for connection, message in waiting:
            self.at_the_gate(connection, message)

    def say_again(self) -> None:
        for message in self.succession.all_again:
            self._say(message)
