"""The connections between agents and controllers, each of which lives in an agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from adaptor.controller.failover import TRY_CONNECT_TIMEOUT_S
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello, FromAgent
from tests.simulation.clock import Body, Link, Process

if TYPE_CHECKING:
    from tests.simulation.agent import Agent
    from tests.simulation.spare_nodes import SpareGate, SpareNode
    from tests.simulation.world import World

# When a silence is noticed, after it has begun.
SILENT_S = (2.0 * wire.ASK_S, 3.0 * wire.ASK_S + 0.1)


class Lost:
    """What arrives last on a connection of which one side has ended, where that is known."""


# A process at one end of a connection, and what it does with what arrives there.
End = tuple[Process, Callable[[Any, Any], None]]


class Connection:
    """From a process on `machine` to one on `to`. It keeps its order, different ones overtake each other.

    node   of the agent that has made it; -1: a spare node that waits has
    """

    def __init__(self, network: Network, machine: int, to: int, *, node: int, upper: End, lower: End) -> None:
        self.machine = machine
        self.to = to
        self.node = node
        self._network = network
        self._upper, self._lower = upper, lower
        clock = network.world.clock
        self.up = Link(clock, network.delay, self._rises)
        self.down = Link(clock, network.delay, self._falls)

    def _rises(self, message: FromAgent | Lost) -> None:
        if isinstance(message, AgentHello):
            self._network.heard.add(message.node)
        process, act = self._upper
        process.do(act, self, message)

    def _falls(self, order: Any) -> None:
        process, act = self._lower
        process.do(act, self, order)

    def side(self, machine: int) -> Link:
        """What goes to `machine`."""
        return self.up if machine == self.to else self.down

    def notice(self, side: int, seconds: float) -> None:
        """The process on the machine `side` learns so much later that nothing comes any more."""
        process, act = self._upper if side == self.to else self._lower
        process.later(seconds, act, self, Lost())


class Network:
    """Machines are those of nodes, by their first numbers, and those of spare nodes.

    cut    machines that nothing reaches
    islands  those of them that lived on
    parted  pairs of machines between which nothing passes, or passed for a while
    mended  what was parted is one again, or never was two, or an agent was stopped: some nodes may be reached
            by more than one side
    closed  machines whose agents have ended
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
        gate = self.world.machines[to]
        lower, upper = (agent, agent.told), (gate, gate.at_the_gate)
        return self._begin(Connection(self, agent.machine, to, node=agent.node, upper=upper, lower=lower))

    def wait_at(self, gate: SpareGate, spare: SpareNode) -> Connection:
        """A connection of a spare node to the gate of spare nodes, in the agent of node 0."""
        agent = self.world.agents[0]
        lower, upper = (spare, spare.told), (agent, gate.hear)
        return self._begin(Connection(self, spare.machine, agent.machine, node=-1, upper=upper, lower=lower))

    def _begin(self, made: Connection) -> Connection:
        if self.apart(made.machine, made.to) or {made.machine, made.to} & self.closed:
            for side in sorted({made.machine, made.to}):
                made.side(side).cut()
                if side not in self.closed:
                    made.notice(side, SILENT_S[1])
        else:
            self._connections.append(made)
        return made

    def reach(self, agent: Agent, to: int) -> Body[Connection | None]:
        """A connection to the gate of `to`; None where nobody lets it in."""
        if self.apart(agent.machine, to):
            yield TRY_CONNECT_TIMEOUT_S
            return None
        yield self.delay()
        if to in self.closed or self.apart(agent.machine, to):
            return None
        return self.join(agent, to)

    def _of(self, machine: int) -> list[Connection]:
        return [c for c in self._connections if machine in (c.machine, c.to)]

    def stall(self, machine: int, seconds: float) -> None:
        for connection in self._of(machine):
            connection.up.stall(seconds)
            connection.down.stall(seconds)

    def close(self, machine: int) -> None:
        """The agent there ends: its kernel says so, after or instead of what the agent had to say."""
        if machine in self.closed:
            return
        self.closed.add(machine)
        for connection in self._of(machine):
            other = connection.to if machine == connection.machine else connection.machine
            if machine not in self.cut:
                self._end(connection.side(other), other, connection)
            connection.side(machine).cut()
            self._connections.remove(connection)

    def hang_up(self, connection: Connection) -> None:
        """Who is connected to there does not serve this connection any more."""
        if connection in self._connections:
            self._end(connection.down, connection.machine, connection)
            connection.up.cut()
            self._connections.remove(connection)

    def _end(self, link: Link, other: int, connection: Connection) -> None:
        if self.world.random.random() < 0.5:
            link.send(Lost())
        else:
            link.cut()
            connection.notice(other, self.delay())

    def apart(self, one: int, other: int) -> bool:
        """Whether no packet passes between two machines."""
        if one == other:
            return False
        return one in self.cut or other in self.cut or frozenset((one, other)) in self._silent

    def silence(self, machine: int) -> None:
        """Nothing passes any longer; both sides notice by themselves."""
        self.cut.add(machine)
        self._break()

    def part(self, machines: set[int], others: set[int]) -> None:
        """The same, between `machines` and `others`."""
        self._silent |= {frozenset((one, other)) for one in machines for other in others}
        self.parted |= self._silent
        self.mended = self.mended or machines | others != set(self.world.all_machines)
        self._break()

    def heal(self) -> None:
        """What was parted; who has lost a connection does not come back by it."""
        self._silent.clear()
        self.mended = True

    def _break(self) -> None:
        draw = self.world.random
        for connection in list(self._connections):
            if self.apart(connection.machine, connection.to):
                for side in (connection.machine, connection.to):
                    connection.side(side).cut()
                    connection.notice(side, draw.uniform(*SILENT_S))
                self._connections.remove(connection)
