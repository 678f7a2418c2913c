"""The hub: drives a controller of one generation of workers, in the agent of a node.

It owns what the controller must not have: the clock, the connections to the agents, the store for dumps, the
timeline. Everything runs in the event loop of the agent's control thread.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from adaptor.control import wire
from adaptor.control.controller import Controller, Orders
from adaptor.control.legacy import Heirs
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    Beat,
    ControllerToAgent,
    Dismissed,
    FromAgent,
    Legacy,
    ToController,
)
from adaptor.launchers.chronicle import Chronicle
from adaptor.launchers.gate import LOOPBACK
from adaptor.launchers.roll import Roll
from adaptor.launchers.strangers import Strangers

Send = Callable[[Sequence[ControllerToAgent]], None]
# How often the controller is told the time: deadlines are tens of seconds.
TICK_S = 0.25


class Hub:
    """With the controller of node `term`, which is this one.

    dismissed  the agents of all others: every rank has come to its end, or this node leaves

    Args:
        host: the address at which other nodes reach this one.
        strangers: counts what was not for an agent to say.
    """

    def __init__(
        self,
        term: int,
        world_size: int,
        nodes: int,
        timeout_s: float,
        host: str,
        chronicle: Chronicle,
        strangers: Strangers,
    ):
        self.term = term
        self._nodes = nodes
        self._roll = Roll(world_size, nodes)
        self._sends: dict[int, Send] = {}
        # Lives here, in an agent, so that no worker's death takes it along.
        self._store = _store(host, timeout_s)
        store = (self._store.host, self._store.port)
        self.controller = Controller(world_size, timeout_s, store, chronicle.next_incident, term)
        self._chronicle = chronicle
        self._strangers = strangers
        self._heirs = Heirs() if term == 0 else None
        self.dismissed = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tick()), loop.create_task(self._beat())]

    def succeed(self, legacy: Iterable[Legacy]) -> None:
        """Take the place of the controllers of all earlier terms, of which this is the `legacy`."""
        self._chronicle.took_over(self.term)
        self.controller.succeed(legacy, range(self.term, self._nodes), time.monotonic())

    def lose(self, node: int) -> None:
        """The agent of `node` is gone."""
        self._sends.pop(node, None)
        self._tell(node, AgentLost(node))

    def take(self, node: int, message: FromAgent, send: Send | None = None) -> bool:
        """One message of the agent of `node`, whose orders go to `send` from its hello on.

        Returns False where it was not for this agent to say: then it is counted, and nothing else happens.
        """
        objection = self._roll.objection(node, message)
        if objection:
            self._strangers.count(f"knew the secret and {objection}")
            return False
        if send is not None:
            self._sends[node] = send
        self._tell(node, message)
        return True

    def _tell(self, node: int, message: ToController) -> None:
        self._chronicle.heard(node, message)
        for heir, order in self._heirs.hear(message) if self._heirs else ():
            self._say(heir, [order])
        self._let(functools.partial(self.controller.handle, message))

    def _say(self, node: int, orders: Sequence[ControllerToAgent]) -> None:
        if node in self._sends:
            self._sends[node](orders)

    async def close(self) -> None:
        self._dismiss_others()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        del self._store

    def _dismiss_others(self) -> None:
        """Once; not in an incident: the others' workers wait to be asked then, their agents must end them."""
        if not self.dismissed and self.controller.incident is None and self.controller.verdict is None:
            self.dismissed = True
            self._say_to_others(Dismissed())

    def _say_to_others(self, order: ControllerToAgent) -> None:
        for node in self._sends:
            if node != self.term:
                self._say(node, [order])

    def _deliver(self, orders: Orders) -> None:
        for_node: dict[int, list[ControllerToAgent]] = {}
        for node, order in orders:
            rank = order.rank if isinstance(order, Addressed) else None
            self._chronicle.ordered(node, rank, order.message if isinstance(order, Addressed) else order)
            for_node.setdefault(node, []).append(order)
        for node, all_of_it in for_node.items():  # in one go each: an order to every rank is thousands
            self._say(node, all_of_it)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._let(self.controller.tick)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(wire.BEAT_S)
            self._say_to_others(Beat())

    def _let(self, decide: Callable[[float], Orders]) -> None:
        """Let the controller decide; an error of its own ends the job, because nobody else would."""
        try:
            orders = decide(time.monotonic())
        except Exception as error:
            traceback.print_exc()
            orders = self.controller.give_up(f"{type(error).__name__}: {error}")
        self._deliver(orders)
        if self.controller.roster.everyone_is_dead:
            self._dismiss_others()

    async def hear(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """An agent that has proved the secret, to its end."""
        node = hello.node
        if not self.take(node, hello, lambda orders: writer.write(b"".join(map(wire.frame, orders)))):
            return
        try:
            while True:
                message = await wire.read(reader, wire.from_agent, wire.SLOW_S)
                if not isinstance(message, Beat):
                    self.take(node, message)
        except (EOFError, OSError, msgspec.DecodeError):
            self.lose(node)


def _store(host: str, timeout_s: float) -> Any:
    """The store over which dump groups are formed; on one machine nobody outside of it reaches it."""
    import torch.distributed as dist

    timeout = timedelta(seconds=timeout_s)
    if host != LOOPBACK:
        return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    with socket.create_server((LOOPBACK, 0)) as listener:  # left to itself, it would listen everywhere
        port, descriptor = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=descriptor,
        use_libuv=False,  # older ones take no descriptor
    )
