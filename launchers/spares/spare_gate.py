"""The gate at which spare nodes wait, in the agent of node 0; it lives as long as that agent.

Invariants: a spare that waits has no place in the rendezvous and no worker; a place is given only to spares
that have just answered, and only if there is one for each lost node; the owner of a place that was given away
is written down before any worker starts again, so an agent that was taken for lost cannot come back to it.
The connection of a spare lasts as long as its process, so the loss of one that has taken a place is noticed
even before its agent has connected to the controller. The other agents of the job have a connection here for
that, too: between two starts of the workers no controller would notice that one is lost. A connection may end
alone, by a pause of the network that the one to the controller outlives: who lives comes again at once, and
only the end of its newest connection counts.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import msgspec

from adaptor import output
from adaptor.launchers.agent.generation_state import StartCounts
from adaptor.launchers.control.agent_listener import LOOPBACK, AgentListener, RejectedConnections
from adaptor.launchers.control.invitation import UNIX, Invitation
from adaptor.launchers.control.tls import Tls
from adaptor.protocol import wire
from adaptor.protocol.deadline import deadline
from adaptor.protocol.messages import AgentHello
from adaptor.protocol.spare_messages import Import
from adaptor.protocol.spare_node_messages import (
    MemberHello,
    SpareAccepted,
    SpareAsked,
    SpareHello,
    SpareImports,
    SpareRefused,
    SpareReleased,
    TakePlace,
    from_spare_node,
)

T = TypeVar("T")

# The job's name in the invitation to this gate.
_NAME = "spares"
# How long a spare has for its answer: a process that only waits answers in milliseconds, but the kernel of a
# machine whose process is stopped answers for it.
ANSWER_S = 3.0
# How long a spare that is refused has to read why.
READ_S = 3.0


async def those_that_answer(waiting: list[T], count: int, answers: Callable[[T], Awaitable[bool]]) -> list[T]:
    """Return `count` spares that have answered and still wait, or fewer where there are fewer.

    Args:
        waiting: those that wait; one that goes is removed from it meanwhile.
        count: how many are needed; more are not asked.
        answers: asks one.
    """
    ready: list[T] = []
    for spare in list(waiting):
        if len(ready) < count and await answers(spare):
            # Those that have answered before may have gone meanwhile.
            ready = [one for one in (*ready, spare) if one in waiting]
    return ready


class SpareGate:
    """The gate.

    Args:
        kind: how agents of this job meet (`invitation.kind_of`).
        port: where to listen, or the next free one.
        tls: the certificates of this node; None: without TLS.
        own_hello: what a spare must have in common with this node.
        on_gone: is called when `gone` gets one more.

    Attributes:
        gone: by node, what its agent would tell the next controller first, where the process has ended that
            has this place.
    """

    def __init__(
        self, kind: str, port: int, tls: Tls | None, own_hello: SpareHello, on_gone: Callable[[], None]
    ) -> None:
        self._invitation = Invitation.draw(kind, False, _NAME)
        self._port = port
        self._tls = tls
        self._mine = own_hello
        self._rejected = RejectedConnections("the gate of spare nodes")
        self._listener: AgentListener[SpareHello | MemberHello] | None = None
        self._waiting: list[_Waiting] = []
        self._owners: dict[int, str] = {}  # of places that were given away
        self._newest: dict[int, asyncio.StreamReader] = {}  # by node, the connection whose end is its loss
        self._on_gone = on_gone
        self._imports: Import | None = None
        self.gone: dict[int, AgentHello] = {}

    async def open(self, address: str) -> Invitation:
        """Listen from now on; return the invitation. `address`: at which other nodes reach this one."""
        drawn = self._invitation
        self._listener = AgentListener(drawn.secret, self._tls, self._rejected, self._welcome, _read_hello)
        if drawn.kind == UNIX:
            return drawn._replace(name=self._listener.listen_here())
        return drawn._replace(port=self._listener.listen(LOOPBACK if address == LOOPBACK else "", self._port))

    async def fill(
        self,
        lost: Mapping[int, tuple[int, ...]],
        counts: StartCounts,
        incident: int = 0,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> dict[int, str]:
        """Give the places of `lost` to spares.

        Args:
            lost: the nodes, with their ranks.
            counts: of the starts before that of the spare nodes' workers.
            incident: as in `TakePlace`.
            is_wanted: whether they still are, when spares have answered.

        Returns:
            The new owner of each place; empty if there is not a spare for each.
        """
        ready = await those_that_answer(self._waiting, len(lost), _Waiting.answers)
        if len(ready) < len(lost) or not is_wanted():
            return {}
        owners = {}
        for (node, ranks), spare in zip(lost.items(), ready, strict=True):
            owners[node] = secrets.token_hex(8)
            self._waiting.remove(spare)
            spare.agent = AgentHello(node, ranks, host=spare.host, pid=spare.pid)
            self._owners[node] = owners[node]
            self._newest[node] = spare.reader
            self.gone.pop(node, None)
            place = TakePlace(node, counts.restarts, counts.generations, owners[node], incident)
            spare.writer.write(wire.frame(place))
            output.tell(f"[ttp] {spare.where} takes the place of node {node}; {self._left}")
        return owners

    def tell_imports(self, imports: Import) -> None:
        """Let the processes of all spares, of later ones too, import what a worker of this node has."""
        self._imports = imports
        for spare in self._waiting:
            spare.writer.write(wire.frame(SpareImports(imports)))

    async def close(self) -> None:
        """Send the spares home: the job is over."""
        for spare in self._waiting:
            spare.writer.write(wire.frame(SpareReleased()))
        if self._listener is not None:
            await self._listener.close()
        self._rejected.close()

    @property
    def waiting(self) -> int:
        """Return how many spares wait."""
        return len(self._waiting)

    @property
    def _left(self) -> str:
        count = self.waiting
        return f"{count} spare node{'' if count == 1 else 's'} left"

    async def _welcome(
        self, hello: SpareHello | MemberHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if isinstance(hello, MemberHello):
            await self._outlive(hello, reader, writer)
            return
        if reason := _difference(hello, self._mine):
            writer.write(wire.frame(SpareRefused(reason)))
            output.tell(f"[ttp] the spare node {hello.host} (pid {hello.pid}) is refused: {reason}")
            try:
                async with deadline(READ_S):
                    await reader.read()
            except (OSError, asyncio.TimeoutError):
                pass
            return
        spare = _Waiting(hello, reader, writer)
        self._waiting.append(spare)
        writer.write(wire.frame(SpareAccepted()))
        if self._imports is not None:
            writer.write(wire.frame(SpareImports(self._imports)))
        output.tell(f"[ttp] {spare.where} waits; {self._left}")
        try:
            while True:
                await wire.read(reader, from_spare_node, wire.SLOW_S)
                spare.has_answered.set()
        except (EOFError, OSError, msgspec.DecodeError):
            if spare in self._waiting:
                self._waiting.remove(spare)
                output.tell(f"[ttp] {spare.where} is gone; {self._left}")
            elif spare.agent is not None:
                self._end(spare.agent, reader)

    async def _outlive(
        self, member: MemberHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Wait for the end of an agent that has a place."""
        if member.owner == self._owners.get(member.node, ""):  # else a spare has it, as it was taken for lost
            self._newest[member.node] = reader
            self.gone.pop(member.node, None)
        writer.write(wire.frame(SpareAccepted()))
        try:
            while True:
                await wire.read(reader, from_spare_node, wire.SLOW_S)
        except (EOFError, OSError, msgspec.DecodeError):
            self._end(AgentHello(member.node, member.ranks, host=member.host, pid=member.pid), reader)

    def _end(self, agent: AgentHello, reader: asyncio.StreamReader) -> None:
        """Take `agent` for lost, as its connection has ended, unless it has a newer one."""
        if self._newest.get(agent.node) is reader:
            self.gone[agent.node] = agent
            self._on_gone()


class _Waiting:
    """A spare node.

    Attributes:
        where: it, in words
        agent: what its agent says first, once it has a place
    """

    def __init__(self, hello: SpareHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.host, self.pid = hello.host, hello.pid
        self.agent: AgentHello | None = None
        self.where = f"the spare node {hello.host} (pid {hello.pid})"
        self.has_answered = asyncio.Event()

    async def answers(self) -> bool:
        """Return whether it answers now."""
        self.has_answered.clear()
        self.writer.write(wire.frame(SpareAsked()))
        try:
            async with deadline(ANSWER_S):
                await self.has_answered.wait()
        except asyncio.TimeoutError:
            return False
        return True


async def _read_hello(reader: asyncio.StreamReader) -> SpareHello | MemberHello | None:
    hello = await wire.read(reader, from_spare_node)
    return hello if isinstance(hello, SpareHello | MemberHello) else None


def _difference(spare: SpareHello, own_hello: SpareHello) -> str:
    """Return the first difference that keeps a spare from standing in for a node; '' if there is none."""
    for name, value in own_hello.facts.items():
        if spare.facts.get(name, value) != value:  # a fact that a node does not know is not compared
            return f"{name} is {spare.facts[name]!r} there and {value!r} on node 0"
    for spare_argument, own_argument in zip(spare.arguments, own_hello.arguments, strict=False):
        if spare_argument != own_argument:
            return f"the script's arguments differ: {spare_argument!r} there, {own_argument!r} on node 0"
    if len(spare.arguments) != len(own_hello.arguments):
        has_more = len(spare.arguments) > len(own_hello.arguments)
        side_name, longer = ("there", spare) if has_more else ("on node 0", own_hello)
        first = longer.arguments[min(len(spare.arguments), len(own_hello.arguments))]
        return f"the script's arguments differ: {first!r} is only {side_name}"
    return ""
