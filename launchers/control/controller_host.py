"""Drives the controller of a generation of workers, in the agent of a node.

It owns what the controller must not have: the clock, the connections to the agents, the store for dumps, the
report. Everything runs in the event loop of the agent's control thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from adaptor import output, text
from adaptor.controller.controller import Controller
from adaptor.controller.failover import StandbyReplicator
from adaptor.controller.incident_state import Orders
from adaptor.controller.verdict import Recurrence
from adaptor.launchers.agent.dump_store import DumpStore
from adaptor.launchers.control.agent_registry import AgentRegistry
from adaptor.launchers.control.rejected_connections import RejectedConnections
from adaptor.launchers.records.incident_report import IncidentReport
from adaptor.launchers.records.log import tell_error
from adaptor.protocol import wire
from adaptor.protocol.deadline import deadline
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Dismissed,
    FromAgent,
    Frozen,
    StandbyState,
    ToController,
    Welcome,
)

Send = Callable[[Sequence[ControllerToAgent]], None]
# How often the controller is told the time: deadlines are tens of seconds.
TICK_S = 0.25
_GAP = "the report of the incident has a gap"


class ControllerHost:
    """The controller with its clock and its connections, on node `term`, which is this one.

    Args:
        term: this node; the number of the controller's term.
        world_size: the number of ranks.
        nodes: the number of nodes.
        timeout_s: TTP_OT, in seconds.
        host: the address at which other nodes reach this one.
        report: records messages and orders.
        rejected: counts messages that an agent may not send.
        recurrence: the faults of earlier generations.
        online_s: so long a recovery without a restart may take; 0: there is none.
        host_copy: after how many steps copies in host memory are made; 0: never.

    Attributes:
        controller: the pure controller, which decides
        store: the store over which the ranks of a dump find each other
        nodes: how many there are
        frames: makes orders what goes over the connections to agents
        dismissed: the other agents may end: every rank has come to its end, or this node leaves
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
        host_copy: int = 0,
    ):
        self.term = term
        self.nodes = nodes
        self._sends: dict[int, Send] = {}
        self.frames = wire.OrderFrames()
        # Lives here, in an agent, so that no worker's death takes it along.
        self.store = DumpStore(host, world_size)
        store = (self.store.host, self.store.port, self.store.secret)
        self.controller = Controller(
            world_size, timeout_s, store, report.next_incident, term, recurrence, online_s
        )
        members = self.controller.membership
        members.host_copy = host_copy
        self._registry = AgentRegistry(world_size, nodes, members.lost, members.expected)
        self._incident_report = report
        self._rejected = rejected
        self._replicator = StandbyReplicator() if term == 0 else None
        self.dismissed = False
        self._open_words = ""  # of the open incident, as it was told
        self._has_heard = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self.store.start()
        if self.term == 0:  # else it takes over the workers that there are
            self._record(self._incident_report.record_start)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tick())]
        for task in self._tasks:
            task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """End the job if the task of the clock fails: the controller would wait for ever without it."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._deliver(self.controller.give_up(text.describe(error)))
            tell_error("an error in the controller's clock", error)

    def take_over(self, standby_state: Iterable[StandbyState]) -> None:
        """Take over from the controllers of earlier terms; `standby_state`: what they have passed on."""
        known_messages = list(standby_state)
        self._registry.succeed(known_messages)
        self.controller.succeed(known_messages, range(self.term, self.nodes), time.monotonic())
        self._record(functools.partial(self._incident_report.record_takeover, self.term))

    def lose(self, node: int) -> None:
        """Tell the controller that the agent of `node` is lost."""
        self._sends.pop(node, None)
        self._process(node, AgentLost(node))

    def lose_absent(self, hello: AgentHello) -> None:
        """Take the node of `hello` for lost, unless its agent has come: then its connection tells that."""
        if hello.node in self.controller.membership.expected:
            self.lose(hello.node)
        elif not self._registry.is_here(hello.node):
            self.receive(hello.node, hello)
            self.lose(hello.node)

    def receive(self, node: int, message: FromAgent, send: Send | None = None) -> bool:
        """Take a message from the agent of `node`.

        Args:
            node: the node of the connection.
            message: the message.
            send: with a hello: the function that sends orders to this agent.

        Returns:
            False if this agent may not send it; then it is only counted.
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
        """Let the controller decide, and send its orders; only then record them, so that nothing waits."""
        time_now = time.time()
        if self._replicator and not isinstance(message, Frozen):
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

    async def until(self, is_done: Callable[[], bool], limit_s: float) -> None:
        """Wait until `is_done` is true of what the controller knows, `limit_s` seconds at most."""
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.store.close()

    def _dismiss_others(self) -> None:
        """Dismiss the other agents, once, and not in an incident, in which workers still wait for orders."""
        if not self.dismissed and self.controller.incident is None and self.controller.verdict is None:
            self.dismissed = True
            self._send_to_others(Dismissed())

    def _send_to_others(self, order: ControllerToAgent) -> None:
        for node in self._sends:
            if node != self.term:
                self._send(node, [order])

    def _deliver(self, orders: Orders) -> None:
        for_node: dict[int, list[ControllerToAgent]] = {}
        for node, order in orders:
            for_node.setdefault(node, []).append(order)
        for node, all_of_it in for_node.items():  # one write a node: an order to all ranks is thousands
            self._send(node, all_of_it)
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
        """Record in the report; it is for people, so an error in it ends nothing."""
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
        """Write a line about an incident that is not over: the next line may come after many seconds."""
        words = self.controller.open_words()
        if words and words != self._open_words:
            output.tell(f"[ttp] {words}")
        self._open_words = self._incident_report.open_words = words

    def _decide(self, message: ToController | None) -> Orders:
        """Let the controller decide, and give its orders, which are returned.

        An error of its own ends the job, because nobody else would.

        Args:
            message: what it is told; None: only that time has passed.
        """
        failure, time_now = None, time.monotonic()
        self._has_heard.set()  # who waits looks when this is done
        try:
            orders = (
                self.controller.tick(time_now)
                if message is None
                else self.controller.handle(message, time_now)
            )
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
        """Serve the connection of the agent that has said `hello` and proved the secret, until it ends."""
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
        except Exception as error:  # an error of ours: a node that is no longer read from is a lost one
            self.lose(node)
            tell_error(f"an error in the connection of node {node}", error)
