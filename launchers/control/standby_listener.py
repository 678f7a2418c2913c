"""Listens for agents of other nodes, on the node of the controller and on standby nodes.

Invariant: an agent that connects to a standby waits until the standby has lost the controller, too; so no
controller begins while its predecessor still reaches the node.
"""

from __future__ import annotations

import asyncio
import contextlib

from adaptor.launchers.control.agent_listener import LOOPBACK, AgentListener, RejectedConnections, read_hello
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.control.invitation import UNIX
from adaptor.launchers.control.tls import Tls
from adaptor.protocol import wire
from adaptor.protocol.deadline import deadline
from adaptor.protocol.messages import AgentHello, Endpoint, Verdict

# The time an agent waits at a standby that still has the controller. A standby without a loss after this
# time means that only the network between the agent and the controller is cut.
PATIENCE_S = 5.0


class StandbyListener:
    """The listener of one node, in one generation.

    Args:
        kind: of connections between agents (`invitation.kind_of`).
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
        """Listen from now on; return the endpoint.

        Args:
            address: of this node for other nodes.
        """
        self._listener = AgentListener(
            secret, self._tls, self._rejected, self._welcome, read_hello, further_connections=self._nodes
        )
        if self._kind == UNIX:
            self.endpoint = Endpoint(self._listener.listen_here(), 0)
        else:
            port = self._listener.listen(LOOPBACK if address == LOOPBACK else "", self._port)
            self.endpoint = Endpoint(address, port)
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
        if not self.waiting.is_my_turn and not await self.waiting.wait(hello.node):
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

    @property
    def is_my_turn(self) -> bool:
        """Return whether the turn has begun."""
        return self._turn.is_set()

    def begin_turn(self) -> None:
        """Let all waiting agents go on."""
        self._turn.set()

    async def wait(self, node: int) -> bool:
        """Wait until the turn of this node; return False if the same agent connects again meanwhile."""
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
