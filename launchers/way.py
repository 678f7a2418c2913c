"""An agent's way to the controller, and to the next one when that is lost.

The agent of node 0 has the first controller. Those of the next nodes (`legacy.STANDBYS`) stand by: each has
a gate, open from the start, and keeps what the controller passes on. Where an agent goes that has lost the
controller: `Succession`. One whose turn it is has the controller from then on, of a later term, and is told
by the others all that they had told before.

Invariant: an agent at a gate waits until that node has lost the controller, too: none begins while the one
before is heard there.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from adaptor.config import Config
from adaptor.control import wire
from adaptor.control.deadline import deadline
from adaptor.control.legacy import stands_by
from adaptor.control.messages import AgentHello, Beat, ControllerToAgent, FromAgent, Place, Verdict
from adaptor.control.succession import Succession
from adaptor.launchers.chronicle import Chronicle
from adaptor.launchers.gate import KNOCK_S, LOOPBACK, Gate, knock, reach
from adaptor.launchers.hub import Hub
from adaptor.launchers.strangers import Strangers
from adaptor.launchers.tls import Tls

# So long an agent waits at the gate of a node that has not lost the controller. It will have in a moment; if
# not, the network is cut between this node and the controller alone.
PATIENCE_S = 5.0


class Way:
    """One per generation, on the agent's control thread. After `host` or `join`, `say` and `close`.

    Args:
        node, nodes, world_size: of this agent, and of the job.
        obey: takes the orders.
        despair: is called when there is no controller any more.
    """

    def __init__(
        self,
        node: int,
        nodes: int,
        world_size: int,
        config: Config,
        tls: Tls | None,
        chronicle: Chronicle,
        obey: Callable[[ControllerToAgent], None],
        despair: Callable[[], None],
    ) -> None:
        self._node = node
        self._nodes = nodes
        self._world_size = world_size
        self._config = config
        self._tls = tls
        self._chronicle = chronicle
        self._obey = obey
        self._despair = despair
        self._secret = b""
        self._address = LOOPBACK
        self._succession = Succession(node, nodes)
        self._send: Callable[[FromAgent], None] | None = None
        self._resting = False
        self._my_turn = asyncio.Event()
        self._knows_the_way = asyncio.Event()
        self._strangers = Strangers("the controller's port")
        self._gate: Gate | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.hub: Hub | None = None

    @property
    def alone(self) -> bool:
        """Whether this is the only node."""
        return self._nodes == 1

    async def host(self, host: str, secret: bytes) -> int:
        """Have the first controller; the port of its gate, 0 where no other node would come.

        Args:
            host: the address at which others reach this node.
        """
        self._address, self._secret = host, secret
        self._have_the_controller()
        return self._open_gate().port if self._nodes > 1 else 0

    async def join(self, host: str, port: int, secret: bytes, ranks: tuple[int, ...]) -> None:
        """Find the first controller, and say hello."""
        self._secret = secret
        reader, writer = await knock(host, port, secret, self._tls)
        gate = None
        if stands_by(self._node):
            self._address = host if host == LOOPBACK else writer.get_extra_info("sockname")[0]
            gate = self._open_gate()
        self._send = _sender(writer)
        self.say(AgentHello(self._node, ranks, gate))
        self._spawn(self._follow(reader, writer))

    async def meet(self) -> None:
        """Return once this node knows where it would find the next controllers: before workers start.

        Whoever does not come within the time in which it would have given up is missed by the framework.
        """
        if self.hub is None:
            with contextlib.suppress(asyncio.TimeoutError):
                async with deadline(KNOCK_S):
                    await self._knows_the_way.wait()

    def say(self, message: FromAgent) -> None:
        """To the controller; what it must know, to the next one as well."""
        self._succession.keep(message)
        if self._send is not None:
            self._send(message)

    def rest(self) -> None:
        """The job is over here: whoever is lost from now on, nothing is done about it."""
        self._resting = True

    async def close(self) -> None:
        self.rest()
        self._send = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.hub is not None:
            await self.hub.close()
        if self._gate is not None:
            await self._gate.close()
        self._strangers.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _open_gate(self) -> Place:
        """Where others find it."""
        self._gate = Gate(self._secret, self._tls, self._strangers, self._welcome)
        port = self._gate.listen(LOOPBACK if self._address == LOOPBACK else "", self._config.port)
        return Place(self._address, port)

    # with a controller here

    def _have_the_controller(self) -> Hub:
        address = LOOPBACK if self._nodes == 1 else self._address
        rest = self._world_size, self._nodes, self._config.timeout_s
        self.hub = hub = Hub(self._node, *rest, address, self._chronicle, self._strangers)
        hub.start()
        self._send = lambda message: hub.take(self._node, message, self._hear_soon)
        self._my_turn.set()
        return hub

    def _hear_soon(self, orders: Sequence[ControllerToAgent]) -> None:
        for order in orders:
            asyncio.get_running_loop().call_soon(self._heard, order)

    async def _welcome(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        await self._my_turn.wait()
        if self.hub is not None:
            await self.hub.hear(hello, reader, writer)
        elif self._succession.verdict is not None:  # it stands
            writer.write(wire.frame(self._succession.verdict))
            await reader.read()

    def _take_the_place(self) -> None:
        """Of the controllers of all earlier terms, which are lost."""
        if self._succession.verdict is not None:
            self._my_turn.set()
            return
        hub = self._have_the_controller()
        hub.succeed(self._succession.legacy)
        self._say_again()
        for node in range(self._node):
            hub.lose(node)

    # with the controller on another node

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One controller after the other, until this node has it or nobody has."""
        patience_s: float | None = None
        while True:
            beats = self._spawn(_beat(writer))
            try:
                await self._hear(reader, patience_s)
            except (EOFError, OSError, msgspec.DecodeError, asyncio.TimeoutError):
                self._send = None
                self._knows_the_way.set()  # or never will
            finally:
                beats.cancel()
                writer.close()
            found = None if self._resting else await self._next()
            if found is None:
                return
            reader, writer = found
            patience_s = PATIENCE_S
            self._send = _sender(writer)
            self._say_again()

    async def _hear(self, reader: asyncio.StreamReader, patience_s: float | None) -> None:
        if patience_s is not None:
            async with deadline(patience_s):
                self._heard(await wire.read(reader, wire.to_agent))
        while True:
            self._heard(await wire.read(reader, wire.to_agent, wire.SLOW_S))

    def _heard(self, order: ControllerToAgent) -> None:
        if self._succession.hear(order):
            if isinstance(order, Verdict):
                self._chronicle.next_incident = order.incident + 1
            self._obey(order)
        if self._succession.knows_the_way:
            self._knows_the_way.set()

    async def _next(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """A connection to the next controller; None where it is this node's, or there is none."""
        while self._succession.go_on():
            if self._succession.is_mine:
                try:
                    self._take_the_place()
                except Exception:  # others go on to the next node
                    traceback.print_exc()
                    self._despair()
                return None
            gate = self._succession.gate
            assert gate is not None
            found = await reach(gate.address, gate.port, self._secret, self._tls)
            if found is not None:
                return found
        self._despair()
        return None

    def _say_again(self) -> None:
        assert self._send is not None
        for message in self._succession.all_again:
            self._send(message)


def _sender(writer: asyncio.StreamWriter) -> Callable[[FromAgent], None]:
    return lambda message: writer.write(wire.frame(message))


async def _beat(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(wire.BEAT_S)
        writer.write(wire.frame(Beat()))
