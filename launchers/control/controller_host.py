"""Drives the controller of a generation of workers, in the agent of a node.

The host owns the parts outside of the pure controller: the clock, the connections to the agents, the store
for dumps, the report. Everything runs in the event loop of the agent's control thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import msgspec

from adaptor import output, text
from adaptor.controller import failover
from adaptor.controller.controller import Controller
from adaptor.controller.failover import StandbyReplicator
from adaptor.controller.incident_state import Orders
from adaptor.controller.verdict import Recurrence
from adaptor.launchers.control.agent_connections import RejectedConnections
from adaptor.launchers.control.dump_store_server import DumpStoreServer
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.log import tell_error
from adaptor.protocol import wire
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Dismissed,
    Endpoint,
    FromAgent,
    Frozen,
    StandbyState,
    ToController,
    Welcome,
)
from adaptor.protocol.wire import deadline

Send = Callable[[Sequence[ControllerToAgent]], None]
# Seconds between two ticks of the controller's clock: deadlines are tens of seconds.
TICK_S = 0.25
_GAP = "the report of the incident has a gap"


class ControllerHost:
    """The controller with its clock and connections.

    Args:
        term: the number of the controller's term.
        timeout_s: TTP_OT, in seconds.
        host: the address of this node for other nodes.
        rejected: counts messages that an agent may not send.
        recurrence: the faults of earlier generations.
        online_s: the time limit of a recovery without a restart; 0: none.

    Attributes:
        controller: the pure controller
        store: the store in which the ranks of a dump find each other; survives the death of every worker
        home: the node of the controller
        frames: encodes orders for the connections to agents
        dismissed: the other agents may end: every rank has ended, or this node leaves
    """

    def __init__(
        self,
        term: int,
        world_size: int,
        nodes: int,
        timeout_s: float,
        host: str,
        report: IncidentReport,
        rejected: RejectedConnections,
        recurrence: Recurrence | None = None,
        online_s: float = 0.0,
    ):
        self.term = term
        self.nodes = nodes
        self.home = failover.node_of(term, nodes)
        self._sends: dict[int, Send] = {}
        self.frames = wire.OrderFrames()
        self.store = DumpStoreServer(host, world_size)
        store = (self.store.host, self.store.port, self.store.secret)
        self.controller = Controller(
            world_size, timeout_s, store, report.next_incident, term, recurrence, online_s, self.home
        )
        members = self.controller.membership
        self._registry = AgentRegistry(world_size, nodes, members.lost, members.expected)
        self._incident_report = report
        self._rejected = rejected
        self._replicator = StandbyReplicator(self.home)
        self.dismissed = False
        self._open_words = ""  # the last printed words about the open incident
        self._has_heard = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.store.start()
        if self.term == 0:  # a later term takes over running workers
            self._record(self._incident_report.record_start)
        self._clock = asyncio.get_running_loop().create_task(self._tick())
        self._clock.add_done_callback(self._on_clock_done)

    def _on_clock_done(self, task: asyncio.Task[None]) -> None:
        """End the job if the task of the clock fails: without a clock the controller would wait forever."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._deliver(self.controller.give_up(text.describe(error)))
            tell_error("an error in the controller's clock", error)

    def take_over(
        self, standby_state: Iterable[StandbyState], lost: Collection[int], store: Endpoint | None
    ) -> None:
        """Take over from the controllers of earlier terms.

        Args:
            standby_state: the state that they have passed on.
            lost: their nodes, without those that spare nodes have taken.
            store: as `rendezvous_store` of `Controller.succeed`.
        """
        known_messages = list(standby_state)
        self._registry.succeed(known_messages)
        self._replicator.succeed(known_messages)
        awaited = [node for node in range(self.nodes) if node not in lost]
        self.controller.succeed(known_messages, awaited, time.monotonic(), store)
        self._record(functools.partial(self._incident_report.record_takeover, self.home))

    def lose(self, node: int) -> None:
        """Report the loss of the agent of `node` to the controller."""
        self._sends.pop(node, None)
        self._process(node, AgentLost(node))

    def lose_absent(self, hello: AgentHello) -> None:
        """Count the node of `hello` as lost, unless its agent has connected: a connection reports a loss
        by itself.
        """
        if hello.node in self.controller.membership.expected:
            self.lose(hello.node)
        elif not self._registry.is_here(hello.node):
            self.receive(hello.node, hello)
            self.lose(hello.node)

    def receive(self, node: int, message: FromAgent, send: Send | None = None) -> bool:
        """Take a message from the agent of `node`.

        Args:
            node: the node of the connection.
            send: with a hello: the function that sends orders to the agent.

        Returns:
            False if the agent may not send the message, which is only counted.
        """
        rejection_reason = self._registry.rejection_reason(node, message)
        if rejection_reason:
            self._rejected.count(f"knew the secret and {rejection_reason}")
            return False
        if send is not None:
            self._sends[node] = send
        self._process(node, message)
        return True

    def _process(self, node: int, message: ToController) -> None:
        """Let the controller decide, send its orders, and record last, so that nothing delays orders."""
        time_now = time.time()
        if not isinstance(message, Frozen):
            for standby, order in self._replicator.replicate(message):
                self._send(standby, [order])
        orders = self._decide(message)
        try:
            self._incident_report.record_message(node, message, time_now)
        except Exception as error:
            tell_error(_GAP, error)
        if orders:
            self._record_orders(orders, time_now)
        if type(message) is not Frozen:
            self._record(self._tell_of_open_incident)

    def drill(self, rank: int, newest: int) -> str:
        """End `rank` as a fault would (`Controller.drill`); return why not, "" if the order is sent."""
        order = self.controller.drill(rank, newest)
        self._deliver([] if isinstance(order, str) else [order])
        return order if isinstance(order, str) else ""

    async def until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_done` is true for the controller, at most `limit_s` seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(limit_s):
                while not is_done():
                    self._has_heard.clear()
                    await self._has_heard.wait()

    def _send(self, node: int, orders: Sequence[ControllerToAgent]) -> None:
        if node in self._sends:
            self._sends[node](orders)

    async def close(self) -> None:
        self._dismiss_others()
        if self._clock is not None:
            self._clock.cancel()
            await asyncio.gather(self._clock, return_exceptions=True)
        await self.store.close()

    def _dismiss_others(self) -> None:
        """Dismiss the other agents, once, and not in an incident, in which workers still wait for orders."""
        if not self.dismissed and self.controller.incident is None and self.controller.verdict is None:
            self.dismissed = True
            for node in self._sends:
                if node != self.home:
                    self._send(node, [Dismissed()])

    def _deliver(self, orders: Orders) -> None:
        for_node: dict[int, list[ControllerToAgent]] = {}
        for node, order in orders:
            for_node.setdefault(node, []).append(order)
        for node, node_orders in for_node.items():  # one write per node: orders to all ranks are thousands
            self._send(node, node_orders)
        self.frames.forget()

    def _record_orders(self, orders: Orders, time_now: float) -> None:
        other_orders = orders
        try:
            other_orders = self._incident_report.note_orders(orders, time_now)
        except Exception as error:
            tell_error(_GAP, error)
        for node, order in other_orders:
            rank, message = (order.rank, order.message) if isinstance(order, Addressed) else (None, order)
            self._record(functools.partial(self._incident_report.record_order, node, rank, message, time_now))

    def _record(self, write: Callable[[], None]) -> None:
        """Record in the report; the report is for people, so an error ends nothing."""
        try:
            write()
        except Exception as error:
            tell_error(_GAP, error)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            time_now = time.time()
            self._record_orders(self._decide(None), time_now)
            self._record(self._tell_of_open_incident)

    def _tell_of_open_incident(self) -> None:
        """Print a line about an open incident: the next line may come after many seconds."""
        open_words = self.controller.open_words()
        if open_words and open_words != self._open_words:
            output.tell(f"[ttp] {open_words}")
        self._open_words = self._incident_report.open_words = open_words

    def _decide(self, message: ToController | None) -> Orders:
        """Let the controller decide, and send its orders; return the orders.

        An error of the controller ends the job, because no other process would.

        Args:
            message: the message; None: only time has passed.
        """
        failure, time_now = None, time.monotonic()
        self._has_heard.set()  # waiting tasks look after the decision
        try:
            if message is None:
                orders = self.controller.tick(time_now)
            else:
                orders = self.controller.handle(message, time_now)
        except Exception as error:
            orders, failure = self.controller.give_up(text.describe(error)), error
        if orders:
            self._deliver(orders)
        if failure is not None:
            tell_error("an error in the controller", failure)
        if type(message) is not Frozen and self.controller.membership.everyone_is_dead:
            self._dismiss_others()
        return orders

    async def serve(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve the proved connection of the agent that has said `hello`, until the connection ends."""
        node = hello.node
        if not self.receive(node, hello, lambda orders: writer.write(self.frames(orders))):
            return
        writer.write(wire.frame(Welcome()))
        try:
            while True:
                message = await wire.read(reader, wire.from_agent, wire.SLOW_S)
                self.receive(node, message)
        except (EOFError, OSError, msgspec.DecodeError):
            self.lose(node)
        except Exception as error:  # an internal error: nobody reads from the node any more
            self.lose(node)
            tell_error(f"an error in the connection of node {node}", error)


_FOREIGN_RANK = "spoke for a rank of another node"


class AgentRegistry:
    """The registered nodes and their ranks, in one generation of workers: no agent may report for another.

    An agent with a proof of the secret can still be wrong: two agents have the same node rank, or an agent
    remains from an earlier start.

    Args:
        lost: the nodes that the controller counts as lost.
        expected: the lost nodes whose places were given to spare nodes, with their new owners; all other
            places stay lost.
    """

    def __init__(
        self,
        world_size: int,
        nodes: int,
        lost: Collection[int] = (),
        expected: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._lost = lost
        self._expected = expected
        self._world_size = world_size
        self._nodes = nodes
        # Of places, as known to the previous controller; and the ranks of each node.
        self._owners: dict[int, str] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._homes: dict[int, int] = {}  # ranks, and their nodes
        self._here: set[int] = set()

    def succeed(self, standby_state: Iterable[StandbyState]) -> None:
        """Learn from the previous controller which places spare nodes have taken.

        An agent that was taken for lost may live on, and connect before the new owner of its place.
        """
        for message in standby_state:
            if isinstance(message, AgentHello):
                self._owners[message.node] = message.owner
                self._ranks[message.node] = message.ranks

    def rejection_reason(self, node: int, message: FromAgent) -> str:
        """Return why `message` is rejected from the agent of `node`; empty if accepted.

        The reason is the predicate of a sentence. An accepted hello registers the node and its ranks.
        """
        if isinstance(message, AgentHello):
            return self._enter(message) if message.node == node else "came as another node"
        if node not in self._here:
            return "began with something else than a hello"
        if node in self._lost:
            return "spoke for a node that is lost"
        if isinstance(message, Frozen):  # early: one message per rank, and a dump waits for all
            return "" if self._homes.get(message.rank) == node else _FOREIGN_RANK
        if getattr(message, "node", node) != node:
            return "spoke for another node"
        rank = getattr(message, "rank", None)
        if rank is not None and self._homes.get(rank) != node:
            return _FOREIGN_RANK
        return ""

    def is_here(self, node: int) -> bool:
        """Return whether the agent of `node` has registered; also true after its loss."""
        return node in self._here

    def _enter(self, hello: AgentHello) -> str:
        if hello.node >= self._nodes:
            return "came as a node that the job does not have"
        if hello.owner and hello.owner == self._expected.get(hello.node):
            ranks = {rank for rank, node in self._homes.items() if node == hello.node}
            if (ranks or set(self._ranks.get(hello.node, ()))) != set(hello.ranks):
                return "came with other ranks than the node that is lost"
            self._here.add(hello.node)
            self._homes.update(dict.fromkeys(hello.ranks, hello.node))
            return ""
        if hello.owner != self._owners.get(hello.node, hello.owner):
            return "came as a node whose place another one has"
        if hello.node in self._here:
            return "came as a node that was there already"
        if any(rank >= self._world_size or rank in self._homes for rank in hello.ranks):
            return "came with ranks that the job does not have, or another node has"
        self._here.add(hello.node)
        self._homes.update(dict.fromkeys(hello.ranks, hello.node))
        return ""
