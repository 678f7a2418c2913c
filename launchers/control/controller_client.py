"""Connects an agent with the controller, and with the next controller after a loss.

The agent of node 0 runs the first controller. The agents of the next nodes (`failover.STANDBYS`) stand by:
each listens from the start, and keeps the state that the controller passes on. After the loss of the
controller `Succession` decides to which node an agent goes. The agent whose turn it is runs the controller
from then on, with a later term, and the others repeat their earlier reports.

Invariant: an agent that connects to a standby waits until the standby has lost the controller, too; so no
controller begins while its predecessor still reaches the node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from adaptor.config import Config
from adaptor.controller.failover import Succession, stands_by
from adaptor.controller.verdict import Recurrence
from adaptor.launchers.control.agent_connections import (
    CONNECT_TIMEOUT_S,
    LOOPBACK,
    AgentListener,
    RejectedConnections,
    connect,
    read_hello,
    try_connect,
)
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.control.credentials import UNIX, Invitation, Tls, kind_of
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.log import tell_error
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello, ControllerToAgent, Endpoint, FromAgent, Recovered, Verdict
from adaptor.protocol.wire import deadline

# The time an agent waits at a standby that still has the controller. A standby without a loss after this
# time means that only the network between the agent and the controller is cut.
PATIENCE_S = 5.0


class StandbyListener:
    """The listener of one node, in one generation.

    Args:
        kind: of connections between agents (`credentials.kind_of`).
        port: where to listen, or the next free port.

    Attributes:
        endpoint: the address for other nodes; None: not listening.
        waiting: the agents that connected too early.
    """

    def __init__(
        self, nodes: int, kind: str, port: int, tls: Tls | None, rejected: RejectedConnections
    ) -> None:
        self._nodes = nodes
        self._kind = kind
        self._port = port
        self._tls = tls
        self._rejected = rejected
        self.waiting = WaitingAgents()
        self.endpoint: Endpoint | None = None
        self._host: ControllerHost | None = None
        self._verdict: Verdict | None = None
        self._listener: AgentListener[AgentHello] | None = None

    def listen(self, secret: bytes, address: str) -> Endpoint:
        """Listen at `address`, by which other nodes reach this node; return the endpoint."""
        self._listener = AgentListener(
            secret, self._tls, self._rejected, self._welcome, read_hello, further_connections=self._nodes
        )
        self.endpoint = self._listener.open(self._kind, address, self._port)
        return self.endpoint

    def begin_turn(self, host: ControllerHost | None, verdict: Verdict | None = None) -> None:
        """Serve waiting and new agents: the turn of this node has begun.

        Args:
            host: drives the controller on this node; None: no controller begins any more.
            verdict: the final verdict, without a host.
        """
        self._host, self._verdict = host, verdict
        self.waiting.begin_turn()

    async def close(self) -> None:
        """Close all connections."""
        if self._listener is not None:
            await self._listener.close()

    async def _welcome(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if hello.node >= self._nodes:
            self._rejected.count("came as a node that the job does not have")
            return
        if not await self.waiting.wait(hello.node):
            self._rejected.count("waited for a controller here, and came again")
            return
        if self._host is not None:
            await self._host.serve(hello, reader, writer)
        elif self._verdict is not None:
            writer.write(wire.frame(self._verdict))
            with contextlib.suppress(asyncio.TimeoutError):
                async with deadline(PATIENCE_S):  # time to read the verdict and leave
                    await reader.read()


class WaitingAgents:
    """The agents that wait for the turn of the node to run the controller; used on the control thread.

    Invariant: of each node only the newest agent connection waits, so repeated connections take one place.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Event()
        self._superseded: dict[int, asyncio.Event] = {}  # of waiting agents, by node

    def __len__(self) -> int:
        return len(self._superseded)

    def begin_turn(self) -> None:
        """Let all waiting agents go on."""
        self._turn.set()

    async def wait(self, node: int) -> bool:
        """Wait until the turn of this node; return False if the same agent connects again meanwhile."""
        if self._turn.is_set():
            return True
        event_before, own_event = self._superseded.get(node), asyncio.Event()
        self._superseded[node] = own_event
        if event_before is not None:
            event_before.set()
        superseded = asyncio.ensure_future(own_event.wait())
        turn = asyncio.ensure_future(self._turn.wait())
        try:
            await asyncio.wait((superseded, turn), return_when=asyncio.FIRST_COMPLETED)
            return not own_event.is_set()
        finally:
            superseded.cancel()
            turn.cancel()
            if self._superseded.get(node) is own_event:
                del self._superseded[node]


Send = Callable[[FromAgent], object]


class ControllerClient:
    """The agent's connection to the controller, for one generation; used on its control thread.

    Call `host` or `join` first, then `send` for each message, and `close` at the end.

    Args:
        report: records messages, if the controller runs on this node.
        online_s: the time limit of an online recovery; 0: none.
        obey: is called with each order.
        on_controller_unreachable: is called when no controller is left.
        recurrence: the faults of earlier generations; each verdict is added.
        open_store: is called with the address of this node before its controller takes over; returns the
            address of the rendezvous store in the place of the store of node 0.
        term: of the controller that is there when the agent begins.

    Attributes:
        secret: of the agents of this generation; empty before the first meeting with the controller.
        invitation: to the controller, for spare nodes; only where the controller is.
        address: of this node for other nodes, after the meeting with the controller.
        succession: the next controllers, and the reports that they must know.
        controller_host: with the controller; None on other nodes.
        reporter: the node whose controller ended the last incident and wrote the report; None before. Kept
            after the node leaves: a later line may name the node.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        world_size: int,
        config: Config,
        tls: Tls | None,
        report: IncidentReport,
        online_s: float,
        obey: Callable[[ControllerToAgent], None],
        on_controller_unreachable: Callable[[], None],
        recurrence: Recurrence,
        open_store: Callable[[str], Endpoint | None],
        term: int = 0,
    ) -> None:
        self._open_store = open_store
        self._node = node
        self._nodes = nodes
        self._world_size = world_size
        self._config = config
        self._tls = tls
        self._incident_report = report
        self._online_s = online_s
        self._obey = obey
        self._on_controller_unreachable = on_controller_unreachable
        self._recurrence = recurrence
        self.secret = b""
        self._kind = kind_of(config)
        self.address = LOOPBACK
        self.succession = Succession(node, nodes, term)
        self._drawn: Invitation
        self.invitation: Invitation | None = None
        self._send: Send | None = None  # None: no controller is connected
        self._resting = False
        self._knows_standbys = asyncio.Event()
        self._rejected = RejectedConnections("the controller's port")
        self.listener = StandbyListener(nodes, self._kind, config.port, tls, self._rejected)
        self._tasks: set[asyncio.Task[None]] = set()
        self.controller_host: ControllerHost | None = None
        self.reporter: int | None = None

    async def host(self, host: str, restart: bool, job: str) -> Invitation:
        """Run the first controller on this node.

        Args:
            host: the address of this node for other nodes.
            restart: True if workers ran before, in an earlier generation.

        Returns:
            The invitation, with which other nodes find the controller.
        """
        self._drawn = drawn = Invitation.draw(self._kind, restart, job)
        self.secret = drawn.secret
        if self._kind != UNIX:
            self.address = host
        self._run_controller()
        if self._nodes == 1:
            return drawn
        return self._invite(self.listener.listen(self.secret, self.address))

    def _invite(self, endpoint: Endpoint) -> Invitation:
        """Return the invitation to the controller of this node, at `endpoint`."""
        name = self._drawn.name if endpoint.port else endpoint.address
        self.invitation = self._drawn._replace(port=endpoint.port, name=name)
        return self.invitation

    async def join(
        self,
        host: str,
        invitation_bytes: bytes,
        ranks: tuple[int, ...],
        owner: str = "",
        store: Endpoint | None = None,
    ) -> Invitation:
        """Connect to the controller, and register.

        Args:
            host: the address of the controller.
            invitation_bytes: the invitation to the controller.
            owner, store: as in `AgentHello`.

        Raises:
            StartError: the settings of the nodes differ, or no controller answers.
        """
        self._drawn = invitation = Invitation.decode(invitation_bytes, self._kind)
        self.secret = invitation.secret
        reader, writer = await connect(*invitation.address(host), invitation.secret, self._tls)
        endpoint = None
        if self._kind != UNIX:
            self.address = host if host == LOOPBACK else writer.get_extra_info("sockname")[0]
        if stands_by(self._node):
            endpoint = self.listener.listen(self.secret, self.address)
        self._send = _to(writer)
        self.send(AgentHello(self._node, ranks, endpoint, socket.gethostname(), os.getpid(), owner, store))
        self._spawn(self._follow(reader, writer))
        return invitation

    async def meet(self) -> None:
        """Wait, before workers start, for the addresses of the standby nodes.

        The wait takes at most CONNECT_TIMEOUT_S: the framework will report a node that is missing by then.
        """
        if self.controller_host is None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with deadline(CONNECT_TIMEOUT_S):
                    await self._knows_standbys.wait()

    def send(self, message: FromAgent) -> None:
        """Send `message` to the controller; keep messages that the next controller must know."""
        self.succession.keep(message)
        if self._send is not None:
            self._send(message)

    def rest(self) -> None:
        """Stop reacting to the loss of the controller: the job is over on this node."""
        self._resting = True

    async def close(self) -> None:
        self.rest()
        self._send = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.controller_host is not None:
            await self.controller_host.close()
        await self.listener.close()
        self._rejected.close()

    def _spawn(self, work: Coroutine[object, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Count the controller as unreachable after an error in a task of the connection."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):  # `_follow` handles lost connections
            self._on_controller_unreachable()
            tell_error("an error of ttprun in the connection to the controller", error)

    # with a controller here

    def _run_controller(self) -> ControllerHost:
        address = LOOPBACK if self._nodes == 1 else self.address
        self.controller_host = controller_host = ControllerHost(
            term=self.succession.term,
            world_size=self._world_size,
            nodes=self._nodes,
            timeout_s=self._config.timeout_s,
            host=address,
            report=self._incident_report,
            rejected=self._rejected,
            recurrence=self._recurrence,
            online_s=self._online_s,
        )
        controller_host.start()
        self._send = lambda message: controller_host.receive(self._node, message, self._obey_soon)
        self.listener.begin_turn(controller_host)
        return controller_host

    def _obey_soon(self, orders: Sequence[ControllerToAgent]) -> None:
        for order in orders:
            asyncio.get_running_loop().call_soon(self._on_order, order)

    def _take_over(self) -> None:
        """Run the controller on this node, after the loss of the controllers of all earlier terms."""
        if self.succession.verdict is not None:
            self.listener.begin_turn(None, self.succession.verdict)
            return
        controller_host = self._run_controller()
        if self.listener.endpoint is not None:
            self._invite(self.listener.endpoint)
        lost = self.succession.lost_homes
        controller_host.take_over(self.succession.standby_state, lost, self._open_store(self.address))
        self._report_again()
        for node in lost:
            controller_host.lose(node)

    # with the controller on another node

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Follow one controller after the other, until this node runs the controller or none is left."""
        patience_s: float | None = None
        while True:
            try:
                await self._read_orders(reader, patience_s)
            except (EOFError, OSError, msgspec.DecodeError, asyncio.TimeoutError):
                self._send = None
                self._knows_standbys.set()  # the addresses will never come
            finally:
                writer.close()
            connection = None if self._resting else await self._connect_to_next()
            if connection is None:
                return
            reader, writer = connection
            patience_s = PATIENCE_S
            self._send = _to(writer)
            self._report_again()

    async def _read_orders(self, reader: asyncio.StreamReader, patience_s: float | None) -> None:
        if patience_s is not None:
            async with deadline(patience_s):
                self._on_order(await wire.read(reader, wire.to_agent))
        while True:
            self._on_order(await wire.read(reader, wire.to_agent, wire.SLOW_S))

    def _on_order(self, order: ControllerToAgent) -> None:
        if self.succession.accept(order):
            if isinstance(order, Verdict | Recovered):
                self._incident_report.record_end(order.incident)
                self.reporter = self.succession.home
            if isinstance(order, Verdict):
                self._recurrence.note(order)
                self._knows_standbys.set()  # not needed any more: the starting workers are ended
            self._obey(order)
        if self.succession.knows_standby_endpoints:
            self._knows_standbys.set()

    async def _connect_to_next(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the next controller; return None if this node runs it now, or none is left."""
        while self.succession.go_on():
            if self.succession.is_mine:
                try:
                    self._take_over()
                except Exception as error:  # other agents go on to the next node
                    self._on_controller_unreachable()
                    tell_error("an error of ttprun while its controller took over", error)
                return None
            endpoint = self.succession.endpoint
            assert endpoint is not None
            connection = await try_connect(endpoint.address, endpoint.port, self.secret, self._tls)
            if connection is not None:
                return connection
        self._on_controller_unreachable()
        return None

    def _report_again(self) -> None:
        assert self._send is not None
        for message in self.succession.all_again:
            self._send(message)


def _to(writer: asyncio.StreamWriter) -> Send:
    """Return the function that sends a message to a controller on another node."""
    return lambda message: writer.write(wire.frame(message))
