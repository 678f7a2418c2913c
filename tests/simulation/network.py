"""The connections between agents and the controller, which lives in the agent of node 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptor.control.messages import AgentHello, AgentLost, ControllerToAgent, Dismissed, FromAgent
from tests.simulation.clock import Link

if TYPE_CHECKING:
    from tests.simulation.world import World

# The kernel ends a connection whose other side is silent (`wire.notice_silence`); it looks every second.
SILENT_S = (5.0, 6.5)


class Network:
    """A connection keeps its order, different ones overtake each other.

    gone   nodes that nothing reaches
    heard  nodes that have said who they are
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.gone: set[int] = set()
        self.heard: set[int] = set()
        self._ups: dict[int, Link] = {}
        self._downs: dict[int, Link] = {}
        for node, agent in world.agents.items():
            if node:
                self._ups[node] = Link(world.clock, self._delay, self._hear)
                self._downs[node] = Link(
                    world.clock, self._delay, lambda m, agent=agent: agent.do(agent.obey, m)
                )

    def _delay(self) -> float:
        draw = self._world.random
        return draw.uniform(0.0002, 0.3 if draw.random() < 0.05 else 0.003)

    def _hear(self, message: FromAgent) -> None:
        if isinstance(message, AgentHello):
            self.heard.add(message.node)
        if not isinstance(message, AgentLost) or message.node in self.heard:
            self._world.hear(message)

    def up(self, node: int, message: FromAgent) -> None:
        if node == 0:
            self._hear(message)
        elif node not in self.gone:
            self._ups[node].send(message)

    def down(self, node: int, order: ControllerToAgent) -> None:
        if node == 0:
            agent = self._world.agents[0]
            self._world.clock.after(0.0, agent.do, agent.obey, order)
        elif node not in self.gone:
            self._downs[node].send(order)

    def stall(self, node: int, seconds: float) -> None:
        for link in (self._ups[node], self._downs[node]):
            link.stall(seconds)

    def close(self, node: int) -> None:
        """The agent of `node` ends: its kernel says so, after or instead of what the agent had to say."""
        if node in self.gone:
            return
        self.gone.add(node)
        if node == 0:
            self._close_controller()
            return
        up = self._ups[node]
        if self._world.random.random() < 0.5:
            up.send(AgentLost(node))
        else:
            up.cut()
            self._world.clock.after(self._delay(), self._hear, AgentLost(node))
        self._downs[node].cut()

    def cut(self, node: int) -> None:
        """Nothing passes any longer; both sides notice by themselves."""
        if node in self.gone:
            return
        self.gone.add(node)
        self._ups[node].cut()
        self._downs[node].cut()
        clock, draw, agent = self._world.clock, self._world.random, self._world.agents[node]
        clock.after(draw.uniform(*SILENT_S), self._hear, AgentLost(node))
        agent.later(draw.uniform(*SILENT_S), agent.lose_controller)

    def _close_controller(self) -> None:
        controller = self._world.controller
        self._world.controller_left = True
        undisturbed = (
            self._world.agents[0].alive and controller.incident is None and controller.verdict is None
        )
        for node, agent in self._world.agents.items():
            if node and node not in self.gone:
                self.gone.add(node)
                if undisturbed:
                    self._downs[node].send(Dismissed())
                agent.later(self._delay() + 0.3, agent.lose_controller)
