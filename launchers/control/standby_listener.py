"""Listens for agents of other nodes, on the node of the controller and on those that stand by.

Invariant: an agent that connects to a standby waits until that node has lost the controller, too; so no
controller begins while the one before still reaches its node.
"""

from __future__ import annotations

import asyncio
import contextlib

from adaptor.launchers.control.agent_listener import LOOPBACK, AgentListener, read_hello
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.control.invitation import UNIX
from adaptor.launchers.control.rejected_connections import RejectedConnections
from adaptor.launchers.control.tls import Tls
from adaptor.launchers.control.waiting_agents import WaitingAgents
from adaptor.protocol import wire
from adaptor.protocol.deadline import deadline
from adaptor.protocol.messages import AgentHello, Endpoint, Verdict

# How long an agent waits at a standby that has not lost the controller. It will have in a moment; if not,
# only the network between this node and the controller is cut.
PATIENCE_S = 5.0


class StandbyListener:
    """The listener of one node, in one generation.

    Args:
        nodes: the number of nodes of the job.
        kind: how agents of this job meet (`invitation.kind_of`).
        port: where to listen, or the next free one.
        tls: the certificates of this node; None: without TLS.
        rejected: counts the connections that are rejected.

    Attributes:
        endpoint: where other nodes reach it; None: it does not listen.
        waiting: the agents that have come too early.
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
        """Listen from now on; return where.

        Args:
            secret: the secret of this generation of the job.
            address: at which other nodes reach this one.
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
        """Serve those that wait, and all that come: this node's turn has begun.

        Args:
            host: drives the controller here; None: no controller begins any more.
            verdict: the one that stands, then.
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
        elif self._verdict is not None:  # it stands
            writer.write(wire.frame(self._verdict))
            with contextlib.suppress(asyncio.TimeoutError):
                async with deadline(PATIENCE_S):  # so long it has to read that, and go
                    await reader.read()
