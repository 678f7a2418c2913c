"""The connections between agents and controllers, each of which lives in an agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from adaptor.controller.failover import TRY_CONNECT_TIMEOUT_S
from adaptor.protocol import silence
from adaptor.protocol.messages import AgentHello, ControllerToAgent, FromAgent
from tests.simulation.clock import Body, Link

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.world import World

# When a silence is noticed, after it has begun.
SILENT_S = (2.0 * silence.ASK_S, 3.0 * silence.ASK_S + 0.1)


class Lost:
    """What arrives last on a connection of which one side has ended, where that is known."""


class Connection:
    """Of the agent of `node` to the gate of `to`. It keeps its order, different ones overtake each other."""

    def __init__(self, network: Network, node: int, to: int) -> None:
        self.node = node
        self.to = to
        self._network = network
        clock = network.world.clock
        self.up = Link(clock, network.delay, self._rises)
        self.down = Link(clock, network.delay, self._falls)

    def _rises(self, message: FromAgent | Lost) -> None:
        agent = self._network.world.agents[self.to]
        if isinstance(message, AgentHello):
            self._network.heard.add(message.node)
        agent.do(agent.at_the_gate, self, message)

    def _falls(self, order: ControllerToAgent | Lost) -> None:
        agent = self._network.world.agents[self.node]
        agent.do(agent.told, self, order)

    def side(self, node: int) -> Link:
        """What goes to `node`."""
        return self.up if node == self.to else self.down


class Network:
    """cut    nodes that nothing reaches
    islands  those of them that lived on
    parted  pairs of nodes between which nothing passes, or passed for a while
    mended  what was parted is one again, or never was two, or an agent was stopped: some nodes may be reached
            by more than one side
    closed  nodes whose agents have ended
    heard   nodes that have said who they are
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut: set[int] = set()
        self.islands: set[int] = set()
        self.parted: set[frozenset[int]] = set()
        self._silent: set[frozenset[int]] = set()  # those of them that are apart now
        self.mended = False
        self.closed: set[int] = set()
        self.heard: set[int] = set()
        self._connections: list[Connection] = []

    def delay(self) -> float:
        draw = self.world.random
        return draw.uniform(0.0002, 0.3 if draw.random() < 0.05 else 0.003)

    def join(self, agent: Agent, to: int) -> Connection:
        made = Connection(self, agent.node, to)
        if self.apart(agent.node, to) or {agent.node, to} & self.closed:
            self._notice(made, agent.node, SILENT_S[1])
        else:
            self._connections.append(made)
        return made

    def reach(self, agent: Agent, to: int) -> Body[Connection | None]:
        """A connection to the gate of `to`; None where nobody lets it in."""
        if self.apart(agent.node, to):
            yield TRY_CONNECT_TIMEOUT_S
            return None
        yield self.delay()
        if to in self.closed or self.apart(agent.node, to):
            return None
        return self.join(agent, to)

    def _of(self, node: int) -> list[Connection]:
        return [c for c in self._connections if node in (c.node, c.to)]

    def stall(self, node: int, seconds: float) -> None:
        for connection in self._of(node):
            connection.up.stall(seconds)
            connection.down.stall(seconds)

    def close(self, node: int) -> None:
        """The agent of `node` ends: its kernel says so, after or instead of what the agent had to say."""
        if node in self.closed:
            return
        self.closed.add(node)
        for connection in self._of(node):
            other = connection.to if node == connection.node else connection.node
            if node not in self.cut:
                self._end(connection.side(other), other, connection)
            connection.side(node).cut()
            self._connections.remove(connection)

    def _end(self, link: Link, other: int, connection: Connection) -> None:
        if self.world.random.random() < 0.5:
            link.send(Lost())
        else:
            link.cut()
            self._notice(connection, other, self.delay())

    def apart(self, one: int, other: int) -> bool:
        """Whether no packet passes between two nodes."""
        if one == other:
            return False
        return one in self.cut or other in self.cut or frozenset((one, other)) in self._silent

    def silence(self, node: int) -> None:
        """Nothing passes any longer; both sides notice by themselves."""
        self.cut.add(node)
        self._break()

    def part(self, nodes: set[int], others: set[int]) -> None:
        """The same, between `nodes` and `others`."""
        self._silent |= {frozenset((one, other)) for one in nodes for other in others}
        self.parted |= self._silent
        self.mended = self.mended or nodes | others != set(self.world.agents)
        self._break()

    def heal(self) -> None:
        """What was parted; who has lost a connection does not come back by it."""
        self._silent.clear()
        self.mended = True

    def _break(self) -> None:
        draw = self.world.random
        for connection in list(self._connections):
            if self.apart(connection.node, connection.to):
                for side in (connection.node, connection.to):
                    connection.side(side).cut()
                    self._notice(connection, side, draw.uniform(*SILENT_S))
                self._connections.remove(connection)

    def _notice(self, connection: Connection, side: int, seconds: float) -> None:
        agent = self.world.agents[side]
        act: Any = agent.at_the_gate if side == connection.to else agent.told
        agent.later(seconds, act, connection, Lost())
