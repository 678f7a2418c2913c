"""The hub: drives the controller of one generation of workers, in the agent of node rank 0.

It owns what the controller must not have: the clock, the connections to the agents, the store for dumps, the
timeline. Everything runs in the event loop of the agent's control thread.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec

from adaptor.control import wire
from adaptor.control.controller import Controller, Orders
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Dismissed,
    FromAgent,
    ToController,
)
from adaptor.launchers.chronicle import Chronicle
from adaptor.launchers.gate import LOOPBACK, Gate
from adaptor.launchers.roll import Roll
from adaptor.launchers.strangers import Strangers
from adaptor.launchers.tls import Tls

Send = Callable[[ControllerToAgent], None]
# How often the controller is told the time: deadlines are tens of seconds.
TICK_S = 0.25


class Hub:
    """One per generation; `host` is the address at which other nodes reach this one."""

    def __init__(
        self,
        world_size: int,
        nodes: int,
        timeout_s: float,
        host: str,
        chronicle: Chronicle,
        tls: Tls | None = None,
    ):
        self._host = host
        self._roll = Roll(world_size, nodes)
        self._sends: dict[int, Send] = {}
        # Lives here, in an agent, so that no worker's death takes it along.
        self._store = _store(LOOPBACK if nodes == 1 else host, timeout_s)
        self.controller = Controller(
            world_size, timeout_s, (self._store.host, self._store.port), chronicle.next_incident
        )
        self._chronicle = chronicle
        self._secret = secrets.token_bytes(32)
        self._strangers = Strangers("the controller's port")
        self._gate = Gate(self._secret, tls, self._strangers, self._hear)
        self._ticker: asyncio.Task[None] | None = None

    def listen(self, port: int) -> tuple[int, str]:
        """Accept agents of other nodes; returns the port (the next free one from `port`) and the secret."""
        address = LOOPBACK if self._host == LOOPBACK else ""
        return self._gate.listen(address, port), self._secret.hex()

    def start(self) -> None:
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

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
        self._let(functools.partial(self.controller.handle, message))

    async def close(self) -> None:
        # In the middle of an incident the others' workers wait to be asked: their agents must end them.
        if self.controller.incident is None and self.controller.verdict is None:
            for node, send in self._sends.items():
                if node != 0:
                    send(Dismissed())
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._gate.close()
        self._strangers.close()
        del self._store

    def _deliver(self, orders: Orders) -> None:
        for node, order in orders:
            rank = order.rank if isinstance(order, Addressed) else None
            self._chronicle.ordered(node, rank, order.message if isinstance(order, Addressed) else order)
            if node in self._sends:
                self._sends[node](order)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._let(self.controller.tick)

    def _let(self, decide: Callable[[float], Orders]) -> None:
        """Let the controller decide; an error of its own ends the job, because nobody else would."""
        try:
            orders = decide(time.monotonic())
        except Exception as error:
            traceback.print_exc()
            orders = self.controller.give_up(f"{type(error).__name__}: {error}")
        self._deliver(orders)

    async def _hear(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """An agent that has proved the secret, to its end."""
        node = hello.node
        if not self.take(node, hello, lambda order: writer.write(wire.frame(order))):
            return
        try:
            while True:
                self.take(node, await wire.read(reader, wire.from_agent, wire.SLOW_S))
        except (EOFError, OSError, msgspec.DecodeError):
            del self._sends[node]
            self._tell(node, AgentLost(node))


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
