"""The hub: drives the controller of one generation of workers, in the agent of node rank 0.

It owns what the controller must not have: the clock, the connections to the agents, the store for dumps, the
timeline. Everything runs in the event loop of the agent's control thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import secrets
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from adaptor.control import wire
from adaptor.control.controller import Controller, Orders
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Dismissed,
    FromAgent,
)
from adaptor.launchers.chronicle import Chronicle

Send = Callable[[ControllerToAgent], None]
# How often the controller is told the time: deadlines are tens of seconds.
TICK_S = 0.25
# A stranger has this long to prove the secret; an agent needs two round trips.
HANDSHAKE_S = 10.0
_NONCE_BYTES = 32


class Hub:
    """One per generation. `publish_step` tells at which step the save folder stands."""

    def __init__(self, world_size: int, nodes: int, timeout_s: float, store_host: str, chronicle: Chronicle):
        import torch.distributed as dist

        self._nodes = nodes
        self._sends: dict[int, Send] = {}
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        # Lives here, in an agent, so that no worker's death takes it along.
        self._store = dist.TCPStore(
            "127.0.0.1" if nodes == 1 else store_host,
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        self.controller = Controller(
            world_size, timeout_s, (self._store.host, self._store.port), chronicle.next_incident
        )
        self._chronicle = chronicle
        self._secret = secrets.token_bytes(32)
        self._ticker: asyncio.Task[None] | None = None

    async def listen(self, port: int) -> tuple[int, str]:
        """Accept agents of other nodes; returns the port (the next free one from `port`) and the secret."""
        for candidate in range(port, 65536):
            with contextlib.suppress(OSError):
                self._server = await asyncio.start_server(self._accept, None, candidate)
                return candidate, self._secret.hex()
        raise OSError(f"no free port from {port} on for the controller")

    def start(self) -> None:
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    def attach(self, node: int, send: Send) -> None:
        self._sends[node] = send

    def take(self, node: int, message: FromAgent) -> None:
        """One message of the agent of `node`."""
        self._chronicle.heard(node, message)
        self._let(functools.partial(self.controller.handle, message))

    async def close(self) -> None:
        # In the middle of an incident the others' workers wait to be asked: their agents must end them.
        if self.controller.incident is None and self.controller.verdict is None:
            for node, send in self._sends.items():
                if node != 0:
                    send(Dismissed())
        tasks = [task for task in (self._ticker, *self._connections) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
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

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        node = -1
        wire.notice_silence(writer.get_extra_info("socket"))
        try:
            async with _deadline(HANDSHAKE_S):
                await prove(reader, writer, self._secret, first=False)
                hello = await wire.read(reader, wire.from_agent)
            if not isinstance(hello, AgentHello):
                return
            node = hello.node
            self.attach(node, lambda order: writer.write(wire.frame(order)))
            self.take(node, hello)
            while True:
                self.take(node, await wire.read(reader, wire.from_agent))
        except (EOFError, OSError, TimeoutError, asyncio.TimeoutError, ValueError):
            if node >= 0:
                self._sends.pop(node, None)
                self.take(node, AgentLost(node))
        finally:
            self._connections.discard(task)
            writer.close()


def _deadline(seconds: float) -> Any:
    """`asyncio.timeout` (3.11 and later), or what does the same on 3.10."""
    if hasattr(asyncio, "timeout"):
        return asyncio.timeout(seconds)
    return _Deadline(seconds)


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def expire() -> None:
            self._expired = True
            task.cancel()

        self._handle = asyncio.get_running_loop().call_later(self._seconds, expire)

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._handle.cancel()
        if self._expired and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError


async def prove(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, first: bool
) -> None:
    """Both sides prove that they know the job's secret before a message is read.

    Raises:
        ConnectionError: the other side does not know it.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    writer.write(mine)
    theirs = await reader.readexactly(_NONCE_BYTES)
    role, other = (b"agent", b"controller") if first else (b"controller", b"agent")
    writer.write(hmac.digest(secret, role + theirs + mine, "sha256"))
    answer = await reader.readexactly(32)
    if not hmac.compare_digest(answer, hmac.digest(secret, other + mine + theirs, "sha256")):
        raise ConnectionError("the other side does not know the secret of this job")
