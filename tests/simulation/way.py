"""A simulated agent's way to the controller: `launchers.way` without sockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptor.control.legacy import STANDBYS
from adaptor.control.messages import (
    AgentHello,
    ControllerToAgent,
    FromAgent,
    Layout,
    Legacy,
    Recalled,
    Verdict,
)
from adaptor.launchers.way import LASTING, PATIENCE_S
from tests.simulation.clock import Body, Process
from tests.simulation.hub import Hub
from tests.simulation.network import Connection, Lost

if TYPE_CHECKING:
    from tests.simulation.world import World


class Follower(Process):
    """Follows one controller after the other, or has one.

    hub         with the controller, where this agent has one
    connection  the way to the controller of another node
    resting     nobody minds any longer if the controller is lost
    verdict     the one that it has been given
    """

    verdict: Verdict | None = None

    def __init__(self, world: World, node: int) -> None:
        super().__init__(world.clock)
        self.world = world
        self.node = node
        self.hub: Hub | None = None
        self.connection: Connection | None = None
        self.legacy: dict[tuple[type, int], Legacy] = {}
        self._gates: set[int] = set()
        self._said: list[FromAgent] = []
        self._term = 0
        self._my_turn = False
        self._silent_since = -1.0  # no word from a gate that was come to
        self._waiting: list[tuple[Connection, FromAgent | Lost]] = []

    def obey(self, order: ControllerToAgent) -> None:
        raise NotImplementedError

    def despair(self) -> None:
        """There is no controller any more."""
        raise NotImplementedError

    @property
    def resting(self) -> bool:
        raise NotImplementedError

    def say(self, message: FromAgent) -> None:
        if isinstance(message, LASTING):
            self._said.append(message)
        self._say(message)

    def say_first(self, hello: AgentHello) -> None:
        """Before what was said too early, of workers that ended before they began."""
        early, self._said = self._said, []
        for message in (hello, *early):
            self.say(message)

    def _say(self, message: FromAgent) -> None:
        if self.hub is not None:
            self.hub.hear(self.node, message)
        elif self.connection is not None:
            self.connection.up.send(message)

    def have_the_controller(self) -> Hub:
        self._my_turn = True
        self.hub = self.world.hubs[self.node] = Hub(self)
        return self.hub

    def at_the_gate(self, connection: Connection, message: FromAgent | Lost) -> None:
        """Of an agent of another node; it waits until it is this node's turn."""
        if not self._my_turn:
            self._waiting.append((connection, message))
        elif self.hub is None:
            if isinstance(message, AgentHello) and self.verdict is not None:
                connection.down.send(self.verdict)
        elif isinstance(message, Lost):
            self.hub.lose(connection.node, connection)
        else:
            self.hub.hear(connection.node, message, connection)

    def told(self, connection: Connection, order: ControllerToAgent | Lost) -> None:
        if connection is not self.connection:
            return
        if not isinstance(order, Lost):
            self._silent_since = -1.0
            self.heard(order)
            return
        self.connection = None
        if not self.resting:
            self.thread(self._next())

    def heard(self, order: ControllerToAgent) -> None:
        match order:
            case AgentHello(node=node, gate=gate):
                self.legacy[AgentHello, node] = order
                if gate is not None:
                    self._gates.add(node)
            case Layout(rank=rank):
                self.legacy[Layout, rank] = order
            case Verdict():
                if self.verdict is None:
                    self.obey(order)
            case _:
                self.obey(order)

    def _next(self) -> Body[None]:
        while self._term < STANDBYS:
            self._term += 1
            if self._term == self.node and (AgentHello, 0) in self.legacy:
                self._take_the_place()
                return
            if self._term in self._gates and self._term != self.node:
                found = yield from self.world.network.reach(self, self._term)
                if found is not None and not self.resting:
                    self.connection = found
                    self._silent_since = self.clock.now
                    self.say_again()
                    self.later(PATIENCE_S, self._lose_patience, found)
                    return
        self.despair()

    def _lose_patience(self, connection: Connection) -> None:
        if connection is self.connection and self._silent_since >= 0:
            self.told(connection, Lost())

    def _take_the_place(self) -> None:
        if self.verdict is None:
            self.have_the_controller().succeed()
        self._my_turn = True
        waiting, self._waiting = self._waiting, []
        for connection, message in waiting:
            self.at_the_gate(connection, message)

    def say_again(self) -> None:
        for message in (*self._said, Recalled(self.node, self.verdict)):
            self._say(message)
