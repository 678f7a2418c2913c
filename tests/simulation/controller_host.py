"""A simulated hub: `launchers.controller_host` without sockets, around the real controller of one term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptor.controller.controller import Controller
from adaptor.controller.failover import StandbyReplicator
from adaptor.controller.outcome import Orders
from adaptor.launchers.controller_host import TICK_S
from adaptor.protocol.messages import (
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Dismissed,
    FromAgent,
    ToController,
    Welcome,
)
from tests.simulation.invariants import Watch

if TYPE_CHECKING:
    from tests.simulation.controller_client import Follower
    from tests.simulation.network import Connection


class ControllerHost:
    """In `agent`; `here` are the nodes that have come, and how they are told things."""

    def __init__(self, agent: Follower) -> None:
        self.world = world = agent.world
        self.agent = agent
        self.term = agent.node
        self.controller = Controller(
            len(world.job.nodes),
            world.timeout_s,
            ("store", self.term, b""),
            term=self.term,
            online_s=world.online_s,
        )
        self.replicator = StandbyReplicator() if self.term == 0 else None
        self.here: dict[int, Connection | None] = {}
        self.left = False
        self.watch = Watch(world, self)
        self._ticking = False

    def succeed(self) -> None:
        """Take the place of the controllers of earlier terms."""
        world, agent = self.world, self.agent
        world.tell(f"-- node {self.term} takes over")
        nodes = range(self.term, len(world.agents))
        self.controller.succeed(agent.succession.standby_state, nodes, world.clock.now)
        agent.say_again()
        for node in range(self.term):
            self._heard(AgentLost(node))
        world.faults.on_state("TAKING OVER")

    def leave(self) -> None:
        """Its agent ends."""
        if self.controller.incident is None and self.controller.verdict is None:
            for node in self.here:
                if node != self.term:
                    self.say(node, Dismissed())
        self.left = True

    def hear(self, node: int, message: FromAgent, connection: Connection | None = None) -> None:
        """`connection` is by which it came, None from this node's own agent."""
        if isinstance(message, AgentHello):
            self.here[node] = connection
            self.say(node, Welcome())
        if node in self.here and self.here[node] is connection:
            self._heard(message)

    def lose(self, node: int, connection: Connection) -> None:
        if self.here.get(node) is connection:
            del self.here[node]
            self._heard(AgentLost(node))

    def _heard(self, message: ToController) -> None:
        if self.left:
            return
        if self.world.log is not None:
            self.world.tell(f"term {self.term} heard {message}")
        self.watch.heard(message)
        for node, order in self.replicator.replicate(message) if self.replicator else ():
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
            self.watch.ordered(node, order)
            self.say(node, order)
        self.watch.decided()
        incident = self.controller.incident
        if incident is not None:
            self.world.faults.on_state(incident.state.stage.name)
            if incident.regrouping.is_pending:
                self.world.faults.on_regrouping()

    def say(self, node: int, order: ControllerToAgent) -> None:
        if node == self.term:
            self.agent.later(0.0, self.agent.heard, order)
        elif self.here.get(node) is not None:
            self.here[node].down.send(order)  # type: ignore[union-attr]
