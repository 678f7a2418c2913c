"""The gate at which spare nodes wait, in the agent of node 0, and the places that spare nodes fill.

The gate lasts as long as the agent. The nodes that stand by for the controller have gates, too. Spares get
the addresses from node 0; such a gate serves spares once its node has taken the controller over.

Invariants: a waiting spare has no place in the rendezvous and no worker; a place is given only to spares
that have just answered, and only if each lost node gets a spare; the new owner is written before any worker
starts again, so an agent that was taken for lost cannot return to its place.

With c10d, whose nodes get new numbers at each restart, the gate is open while the job has all of its nodes.
At a restart as many spares meet the other nodes as places are empty, and the gate forgets all numbers.

The connection of a spare lasts as long as its process, so the loss of a spare with a place is noticed before
its agent connects to the controller. The other agents of the job also keep a connection to the gate: between
two starts of the workers no controller would notice their loss. A connection may end alone, in a pause of
the network that the connection to the controller survives: a living agent connects again at once, and only
the end of its newest connection counts.

Node 0 decides on its control thread which spare nodes fill the places of lost nodes, and writes the owners
into the rendezvous store (`places`); the other nodes wait for the entries. A place is filled either for the
restart after a verdict, or online, while the other nodes keep their workers. Online, the spare node belongs
to the job at once: if a verdict comes before its agent has connected, node 0 waits for the agent, which gets
the verdict and starts again with all others. After the loss of node 0 the node that has taken the controller
over decides, and writes into its new store.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from adaptor import output
from adaptor.controller.controller import Controller
from adaptor.controller.failover import may_go_on
from adaptor.controller.membership import Membership
from adaptor.launchers.control.agent_connections import AgentListener, RejectedConnections
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.control.credentials import Invitation, Tls
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello, Endpoint, FillPlaces, PlacesFilled
from adaptor.protocol.spare_messages import (
    Gate,
    Import,
    MemberHello,
    NextGates,
    SpareAccepted,
    SpareAsked,
    SpareHello,
    SpareImports,
    SpareRefused,
    SpareReleased,
    TakePlace,
    from_spare_node,
)
from adaptor.protocol.wire import deadline

T = TypeVar("T")

# The job name in the invitation to the gate.
_NAME = "spares"
# The time for the answer of a spare: a waiting process answers in milliseconds, but for a stopped process
# only the kernel answers.
ANSWER_S = 3.0
# The time for a refused spare to read the reason.
READ_S = 3.0
# The time for the agent of a new owner to connect to the controller: the agent starts torch elastic, which
# takes seconds. The other nodes wait longer (`places.DECIDED_S`).
COMES_S = 20.0
# The time for spare nodes to come to the gate of the node that has taken over: they notice the loss of node 0
# by themselves, as this node has, and the save has taken time, too.
MOVES_S = 5.0
_NONE_WAITS = "no spare node waits"


class StartCounts(NamedTuple):
    """The starts of the workers of a job so far, for nodes that join later.

    Attributes:
        restarts: the used restarts of --max-restarts
        generations: the number of starts of workers, restarts included
    """

    restarts: int = 0
    generations: int = 0


NO_STARTS = StartCounts()


class JoinedTraining(NamedTuple):
    """The training that spare nodes join; the attributes are those of `TakePlace`."""

    controller: Gate
    term: int
    store: Endpoint | None


async def answering_spares(waiting: list[T], count: int, answers: Callable[[T], Awaitable[bool]]) -> list[T]:
    """Return `count` spares that have answered and still wait, or fewer.

    Args:
        waiting: the waiting spares; a spare that leaves is removed meanwhile.
        count: the number of needed spares; no more are asked.
        answers: asks one spare.
    """
    ready: list[T] = []
    for spare in list(waiting):
        if len(ready) < count and await answers(spare):
            # Spares that have answered may have left meanwhile.
            ready = [candidate for candidate in (*ready, spare) if candidate in waiting]
    return ready


class SpareGate:
    """The gate.

    Args:
        kind: of connections between agents (`credentials.kind_of`).
        port: where to listen, or the next free port.
        own_hello: the facts that a spare must share with the node.
        on_gone: is called after each addition to `gone`.

    Attributes:
        gone: by node, the first message of the owner's agent to the next controller, for owners whose
            process has ended.
        store: the rendezvous store, if the job has lost the store of its flags; else None.
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
        self._newest: dict[int, asyncio.StreamReader] = {}  # by node, the newest connection
        self._on_gone = on_gone
        self._imports: Import | None = None
        self.gone: dict[int, AgentHello] = {}
        self.store: Endpoint | None = None
        self._turn = asyncio.Event()
        self._has_waited = False  # in this turn, for spares that did not come
        self._arrived = asyncio.Event()
        self._next_gates: dict[int, Gate] = {}  # by node

    def begin_turn(self, store: Endpoint | None = None) -> None:
        """Serve spares from now on: the node is node 0, or has taken the controller over.

        Args:
            store: the rendezvous store, in the place of the store that was lost with node 0; None: the store
                stays. The flags of a spare that waits here may still name the lost store.
        """
        self.store = store or self.store
        self._has_waited = False
        self._turn.set()

    def end_turn(self) -> None:
        """Send all spares to the next gates: another node has the controller from now on."""
        self._turn.clear()
        spares, self._waiting[:] = [*self._waiting], []
        for spare in spares:
            spare.writer.close()

    def release(self, count: int) -> None:
        """Have `count` spares meet the other nodes: all workers start again, and nodes get new numbers."""
        self._owners, self._newest, self.gone, self._next_gates = {}, {}, {}, {}
        for spare in self._waiting[:count]:
            spare.writer.write(wire.frame(SpareReleased(meets=True)))
        del self._waiting[:count]

    async def await_spares(self, count: int, limit_s: float) -> None:
        """Wait for `count` spares, at most `limit_s` seconds; not again after a wait in vain."""
        if self._has_waited:
            return
        try:
            async with deadline(limit_s):
                while self.waiting < count:
                    self._arrived.clear()
                    await self._arrived.wait()
        except asyncio.TimeoutError:
            self._has_waited = True

    async def open(self, address: str) -> Invitation:
        """Listen from now on; return the invitation.

        Args:
            address: of this node for other nodes.
        """
        drawn = self._invitation
        self._listener = AgentListener(drawn.secret, self._tls, self._rejected, self._welcome, _read_hello)
        endpoint = self._listener.open(drawn.kind, address, self._port)
        return drawn._replace(port=endpoint.port, name=drawn.name if endpoint.port else endpoint.address)

    async def fill(
        self,
        lost: Mapping[int, tuple[int, ...]],
        counts: StartCounts,
        incident: int = 0,
        refuses: Callable[[], Awaitable[str]] | None = None,
        joined: JoinedTraining | None = None,
    ) -> dict[int, str]:
        """Give the places of `lost` nodes to spares.

        Args:
            lost: the nodes, with their ranks.
            counts: of the starts before the start of the spare nodes' workers.
            incident: as in `TakePlace`.
            joined: what the spares join; None: all workers are started.
            refuses: called once enough spares have answered: why they get no places, "" if they do.

        Returns:
            The new owner of each place; empty if the spares are too few.
        """
        ready = await answering_spares(self._waiting, len(lost), _Waiting.answers)
        if len(ready) < len(lost) or (refuses is not None and await refuses()):
            return {}
        if not all(spare in self._waiting for spare in ready):  # one has left meanwhile
            return {}
        # No await from here to the report (`PlacesFilled`): the agent of a spare must not come before it.
        owners = {}
        for (node, ranks), spare in zip(lost.items(), ready, strict=True):
            owners[node] = secrets.token_hex(8)
            self._waiting.remove(spare)
            spare.agent = AgentHello(node, ranks, host=spare.host, pid=spare.pid)
            self._owners[node] = owners[node]
            self._newest[node] = spare.reader
            self.gone.pop(node, None)
            store = self.store if joined is None else joined.store
            place = TakePlace(node, counts.restarts, counts.generations, owners[node], incident, store)
            if joined is not None:
                place = msgspec.structs.replace(place, controller=joined.controller, term=joined.term)
            spare.writer.write(wire.frame(place))
            output.tell(f"[ttp] {spare.where} takes the place of node {node}; {self._left_text}")
        return owners

    def tell_imports(self, imports: Import) -> None:
        """Let the processes of all spares, also later spares, import the modules of a worker of the node."""
        self._imports = imports
        for spare in self._waiting:
            spare.writer.write(wire.frame(SpareImports(imports)))

    async def close(self, *, failed: bool = False, meets: bool = False) -> None:
        """Release the spares; `failed` and `meets` as in `SpareReleased`."""
        for spare in self._waiting:
            spare.writer.write(wire.frame(SpareReleased(failed, meets)))
        if self._listener is not None:
            await self._listener.close()
        self._rejected.close()

    @property
    def waiting(self) -> int:
        """Return the number of waiting spares."""
        return len(self._waiting)

    @property
    def _left_text(self) -> str:
        count = self.waiting
        return f"{count} spare node{'' if count == 1 else 's'} left"

    async def _welcome(
        self, hello: SpareHello | MemberHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if isinstance(hello, MemberHello):
            await self._watch_member(hello, reader, writer)
            return
        if not await self._await_turn(reader):
            return
        if reason := _difference(hello, self._mine):
            writer.write(wire.frame(SpareRefused(reason)))
            output.tell(f"[ttp] the spare node {hello.host} (pid {hello.pid}) is refused: {reason}")
            with contextlib.suppress(OSError, asyncio.TimeoutError):
                async with deadline(READ_S):
                    await reader.read()
            return
        spare = _Waiting(hello, reader, writer)
        self._waiting.append(spare)
        self._arrived.set()
        writer.write(wire.frame(SpareAccepted()))
        if self._next_gates:
            writer.write(wire.frame(self._next_gates_message))
        if self._imports is not None:
            writer.write(wire.frame(SpareImports(self._imports)))
        output.tell(f"[ttp] {spare.where} waits; {self._left_text}")
        try:
            while True:
                await wire.read(reader, from_spare_node, wire.SLOW_S)
                spare.has_answered.set()
        except (EOFError, OSError, msgspec.DecodeError):
            if spare in self._waiting:
                self._waiting.remove(spare)
                output.tell(f"[ttp] {spare.where} is gone; {self._left_text}")
            elif spare.agent is not None:
                self._end(spare.agent, reader)

    async def _await_turn(self, reader: asyncio.StreamReader) -> bool:
        """Wait for the turn of this gate; return False if the spare, which says nothing yet, leaves."""
        turn, left = asyncio.ensure_future(self._turn.wait()), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait((turn, left), return_when=asyncio.FIRST_COMPLETED)
            return not left.done()
        finally:
            for waiting in (turn, left):
                waiting.cancel()
            await asyncio.gather(turn, left, return_exceptions=True)

    @property
    def _next_gates_message(self) -> NextGates:
        return NextGates(tuple(gate for _, gate in sorted(self._next_gates.items())))

    async def _watch_member(
        self, member: MemberHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Keep the connection of an agent of the job; its end counts as the loss of its node."""
        if member.owner == self._owners.get(member.node, ""):  # otherwise a spare owns the place
            self._newest[member.node] = reader
            self.gone.pop(member.node, None)
            if member.gate is not None:
                self._next_gates[member.node] = member.gate
                for spare in self._waiting:
                    spare.writer.write(wire.frame(self._next_gates_message))
        writer.write(wire.frame(SpareAccepted()))
        try:
            while True:
                await wire.read(reader, from_spare_node, wire.SLOW_S)
        except (EOFError, OSError, msgspec.DecodeError):
            self._end(AgentHello(member.node, member.ranks, host=member.host, pid=member.pid), reader)

    def _end(self, agent: AgentHello, reader: asyncio.StreamReader) -> None:
        """Count `agent` as lost after the end of its newest connection."""
        if self._newest.get(agent.node) is reader:
            self._next_gates.pop(agent.node, None)
            self.gone[agent.node] = agent
            self._on_gone()


class _Waiting:
    """A spare node.

    Attributes:
        where: the spare node, in words
        agent: the first message of its agent, after the spare got a place
    """

    def __init__(self, hello: SpareHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.host, self.pid = hello.host, hello.pid
        self.agent: AgentHello | None = None
        self.where = f"the spare node {hello.host} (pid {hello.pid})"
        self.has_answered = asyncio.Event()

    async def answers(self) -> bool:
        """Return whether the spare answers now."""
        self.has_answered.clear()
        self.writer.write(wire.frame(SpareAsked()))
        with contextlib.suppress(asyncio.TimeoutError):
            async with deadline(ANSWER_S):
                return await self.has_answered.wait()
        return False


async def _read_hello(reader: asyncio.StreamReader) -> SpareHello | MemberHello | None:
    hello = await wire.read(reader, from_spare_node)
    return hello if isinstance(hello, SpareHello | MemberHello) else None


def _difference(spare: SpareHello, own_hello: SpareHello) -> str:
    """Return the first difference that keeps a spare from replacing a node; '' without a difference."""
    for name, value in own_hello.facts.items():
        if spare.facts.get(name, value) != value:  # facts unknown to the spare are not compared
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


async def await_owners(
    members: Membership, until: Callable[[Callable[[], bool], float], Awaitable[None]]
) -> None:
    """Wait, after a verdict, for the agents of spare nodes with places; forget places whose agent is late.

    The controller ends with the generation, so a later agent would find no controller.

    Args:
        members, until: as in `fill_for_restart`.
    """
    await until(lambda: members.expected.keys() <= members.late, COMES_S)
    for node in members.expected.keys() - members.late:
        del members.expected[node]


async def fill_for_restart(
    gate: SpareGate,
    members: Membership,
    lost: Sequence[int],
    counts: StartCounts,
    until: Callable[[Callable[[], bool], float], Awaitable[None]],
    refuses: Callable[[], Awaitable[str]] | None = None,
) -> dict[int, str]:
    """Give the places of `lost` nodes for the following restart; return the owners, {} if one stays empty.

    Args:
        gate: where spare nodes wait.
        members: of the generation that has ended.
        lost: the nodes named by the verdict.
        counts: `restarts` includes the following restart, `generations` does not.
        until: `ControllerHost.until` of the controller with the members.
        refuses: as in `SpareGate.fill`.
    """
    await await_owners(members, until)
    coming = {node: owner for node, owner in members.expected.items() if node in lost}
    empty = {node: members.ranks_of(node) for node in lost if node not in coming}
    if not empty:
        return {} if refuses is not None and await refuses() else coming
    owners = await gate.fill(empty, counts, refuses=refuses)
    return {**coming, **owners} if owners else {}


async def fill_online(
    gate: SpareGate | None,
    host: ControllerHost,
    order: FillPlaces,
    counts: StartCounts,
    place_of_controller: Gate,
    refuses: Callable[[Collection[int]], Awaitable[str]],
    report: Callable[[PlacesFilled], object],
) -> None:
    """Give the places of an order while the other nodes keep their workers.

    The place of node 0 first: other spare nodes come to the store that its new owner has opened.

    Args:
        gate: where spare nodes wait; None: the job has no gate.
        host: its controller has given the order.
        place_of_controller: as in `TakePlace`.
        refuses: as in `SpareGate.fill`, with the lost nodes.
        report: takes the report to the controller, or one of node 0 and one of the other places.
    """
    lost, nodes = host.controller.membership.lost, order.nodes
    if gate is not None and host.term:  # spare nodes notice the loss of the controller by themselves
        await gate.await_spares(len(nodes), MOVES_S)
    for places in filter(None, (nodes[:1] if 0 in nodes else (), tuple(node for node in nodes if node))):
        refusal = ""
        owners: dict[int, str] = {}

        async def claim() -> str:
            nonlocal refusal
            refusal = await refuses(nodes)
            return refusal

        if gate is not None and 0 not in places:
            await host.until(lambda: 0 not in lost, COMES_S)
        if 0 in places and not may_go_on(host.nodes, lost):
            refusal = "less than half of the nodes are left"
        elif 0 in lost and 0 not in places:
            refusal = "node 0, which has the rendezvous store, is lost, too"
        elif gate is not None:
            owners = await _fill_online(
                gate, host.controller, order, places, counts, place_of_controller, claim
            )
        reason = "" if owners else refusal or _NONE_WAITS
        report(PlacesFilled(host.controller.home, order.incident, places, owners, reason))
        if not owners:
            return


async def _fill_online(
    gate: SpareGate,
    controller: Controller,
    order: FillPlaces,
    nodes: Sequence[int],
    counts: StartCounts,
    place_of_controller: Gate,
    claim: Callable[[], Awaitable[str]],
) -> dict[int, str]:
    """Give the places of `nodes`, some of those of `order`; return the new owners, as `SpareGate.fill`."""
    places = {node: controller.membership.ranks_of(node) for node in nodes}
    # The start of the spare node's workers is in this generation.
    counts_before = counts._replace(generations=counts.generations - 1)
    # The store of a spare node in the place of node 0 is its own.
    store = None if 0 in places else controller.store_of_node_0 or gate.store
    joined = JoinedTraining(place_of_controller, controller.term, store)
    return await gate.fill(places, counts_before, order.incident, claim, joined)
