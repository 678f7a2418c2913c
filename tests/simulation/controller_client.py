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
    """Follows one controller after the other, or has one.

    hub         with the controller, where this agent has one
    connection  the way to the controller of another node
    resting     nobody minds any longer if the controller is lost
    """

    def __init__(self, world: World, node: int, machine: int) -> None:
        super().__init__(world.clock)
        self.world = world
        self.node = node
        self.machine = machine
        self.controller_host: ControllerHost | None = None
        self.connection: Connection | None = None
        self.succession = Succession(node, len(set(world.job.nodes)))
        self._my_turn = False
        self._silent_since = -1.0  # no word from a listener that was reached
        self._waiting: list[tuple[Connection, FromAgent | Lost]] = []

    def obey(self, order: ControllerToAgent) -> None:
        raise NotImplementedError

    def meet(self) -> None:
        """It knows the way, or will not learn it: workers may start."""
        raise NotImplementedError

    def on_controller_unreachable(self) -> None:
        """There is no controller any more."""
        raise NotImplementedError

    @property
    def resting(self) -> bool:
        raise NotImplementedError

    def say(self, message: FromAgent) -> None:
        self.succession.keep(message)
        self._say(message)

    def say_first(self, hello: AgentHello) -> None:
        """Before what was said too early, of workers that ended before they began."""
        early, self.succession.said = self.succession.said, []
        for message in (hello, *early):
            self.say(message)

    def _say(self, message: FromAgent) -> None:
        if self.controller_host is not None:
            self.controller_host.hear(self.node, message)
        elif self.connection is not None:
            self.connection.up.send(message)

    def have_the_controller(self) -> ControllerHost:
        self._my_turn = True
        self.controller_host = self.world.hubs[self.node, self.machine] = ControllerHost(self)
        return self.controller_host

    def at_the_gate(self, connection: Connection, message: FromAgent | Lost) -> None:
        """Of an agent of another node; it waits until it is this node's turn."""
        if not self._my_turn:
            self._waiting.append((connection, message))
        elif self.controller_host is None:
            if isinstance(message, AgentHello) and self.succession.verdict is not None:
                connection.down.send(self.succession.verdict)
        elif isinstance(message, Lost):
            self.controller_host.lose(connection.node, connection)
        else:
            self.controller_host.hear(connection.node, message, connection)

    def told(self, connection: Connection, order: ControllerToAgent | Lost) -> None:
        if connection is not self.connection:
            return
        if not isinstance(order, Lost):
            self._silent_since = -1.0
            self.heard(order)
            return
        self.connection = None
        self.meet()
        if not self.resting:
            self.thread(self._next())

    def heard(self, order: ControllerToAgent) -> None:
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
            found = yield from self.world.network.reach(self, self.succession.endpoint.port)
            if found is not None and not self.resting:
                self.connection = found
                self._silent_since = self.clock.now
                self.say_again()
                self.later(PATIENCE_S, self._lose_patience, found)
                return
        self.on_controller_unreachable()

    def _lose_patience(self, connection: Connection) -> None:
        if connection is self.connection and self._silent_since >= 0:
            connection.up.send(Lost())
            self.told(connection, Lost())

    def _take_the_place(self) -> None:
        if self.succession.verdict is None:
            self.have_the_controller().succeed()
        self._my_turn = True
        waiting, self._waiting = self._waiting, []
        for connection, message in waiting:
            self.at_the_gate(connection, message)

    def say_again(self) -> None:
        for message in self.succession.all_again:
            self._say(message)
