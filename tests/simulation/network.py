"""The connections between agents and controllers; each controller lives in an agent."""

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

# Seconds after which a silence is noticed, at least and at most.
SILENT_S = (2.0 * wire.ASK_S, 3.0 * wire.ASK_S + 0.1)


class Lost:
    """The last message on a connection whose peer has ended, if that is known."""


# A process at one end of a connection, and its handler of messages.
End = tuple[Process, Callable[[Any, Any], None]]


class Connection:
    """A connection from a process on `machine` to a process on `to`.

    It keeps the order of its messages; messages of different connections overtake each other.

    Attributes:
        node: the node of the connecting agent; -1: a waiting spare node.
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
            self._network.known_nodes.add(message.node)
        process, act = self._upper
        process.do(act, self, message)

    def _falls(self, order: Any) -> None:
        process, act = self._lower
        process.do(act, self, order)

    def side(self, machine: int) -> Link:
        """Return the direction towards `machine`."""
        return self.up if machine == self.to else self.down

    def notice(self, side: int, seconds: float) -> None:
        """Let the process on the machine `side` notice the silence after some seconds."""
        process, act = self._upper if side == self.to else self._lower
        process.later(seconds, act, self, Lost())


class Network:
    """The machines and their connections: first the machines of nodes, by number, then those of spare nodes.

    Attributes:
        cut: machines reached by no packet.
        islands: machines of `cut` with living processes.
        parted: pairs of machines between which no packet passes, or passed for a while.
        mended: whether some nodes may be reached from more than one side: a parted network healed, only some
            machines were parted, or an agent was stopped.
        closed: machines whose agents have ended.
        known_nodes: nodes with a sent hello.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut: set[int] = set()
        self.islands: set[int] = set()
        self.parted: set[frozenset[int]] = set()
        self._silent: set[frozenset[int]] = set()  # pairs of `parted` that are apart now
        self.mended = False
        self.closed: set[int] = set()
        self.known_nodes: set[int] = set()
        self._connections: list[Connection] = []

    def delay(self) -> float:
        draw = self.world.random
        return draw.uniform(0.0002, 0.3 if draw.random() < 0.05 else 0.003)

    def join(self, agent: Agent, to: int) -> Connection:
        gate = self.world.machines[to]
        lower, upper = (agent, agent.receive), (gate, gate.at_the_gate)
        return self._begin(Connection(self, agent.machine, to, node=agent.node, upper=upper, lower=lower))

    def wait_at(self, gate: SpareGate, spare: SpareNode) -> Connection:
        """Connect a spare node to a gate of spare nodes."""
        agent = gate.agent
        lower, upper = (spare, spare.receive), (agent, gate.on_connection_lost)
        return self._begin(Connection(self, spare.machine, agent.machine, node=-1, upper=upper, lower=lower))

    def _begin(self, connection: Connection) -> Connection:
        if self.apart(connection.machine, connection.to) or {connection.machine, connection.to} & self.closed:
            for side in sorted({connection.machine, connection.to}):
                connection.side(side).cut()
                if side not in self.closed:
                    connection.notice(side, SILENT_S[1])
        else:
            self._connections.append(connection)
        return connection

    def reach(self, agent: Agent, to: int) -> Body[Connection | None]:
        """Connect to the gate of `to`; None if the machine cannot be reached."""
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
        """Close the connections of an ending agent: its kernel reports the end, perhaps before messages."""
        if machine in self.closed:
            return
        self.closed.add(machine)
        for connection in self._of(machine):
            peer = connection.to if machine == connection.machine else connection.machine
            if machine not in self.cut:
                self._end(connection.side(peer), peer, connection)
            connection.side(machine).cut()
            self._connections.remove(connection)

    def hang_up(self, connection: Connection) -> None:
        """Close a connection whose server no longer serves it."""
        if connection in self._connections:
            self._end(connection.down, connection.machine, connection)
            connection.up.cut()
            self._connections.remove(connection)

    def _end(self, link: Link, peer: int, connection: Connection) -> None:
        if self.world.random.random() < 0.5:
            link.send(Lost())
        else:
            link.cut()
            connection.notice(peer, self.delay())

    def apart(self, machine: int, peer: int) -> bool:
        """Return whether no packet passes between two machines."""
        if machine == peer:
            return False
        return machine in self.cut or peer in self.cut or frozenset((machine, peer)) in self._silent

    def silence(self, machine: int) -> None:
        """Let no packet reach `machine` any longer; both sides must notice by themselves."""
        self.cut.add(machine)
        self._break()

    def part(self, machines: set[int], other_side: set[int]) -> None:
        """Let no packet pass between `machines` and `other_side` any longer; each side notices by itself."""
        self._silent |= {frozenset((machine, peer)) for machine in machines for peer in other_side}
        self.parted |= self._silent
        self.mended = self.mended or machines | other_side != set(self.world.all_machines)
        self._break()

    def heal(self) -> None:
        """Let packets pass again between parted machines; lost connections do not come back."""
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
