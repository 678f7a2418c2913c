"""The store in which the ranks of a dump find each other, in the agent with the controller."""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from adaptor.launchers.control.agent_connections import (
    LOOPBACK,
    AgentListener,
    RejectedConnections,
    bind,
    bind_here,
)
from adaptor.protocol import wire
from adaptor.protocol.wire import Ask, Keep, Kept, to_store

# An answer also contains the values that the connection will ask for next, up to this size.
AHEAD_BYTES = 1 << 20


class DumpStoreServer:
    """The store of a dump's ranks; listens from the beginning, and answers from `start` to `close`.

    Its listener accepts many connections, so connections without a proof of the secret cannot block others.
    If all agents are on this machine, no other machine and no other user reaches the store.

    Args:
        address: this node's address for other nodes; the loopback address: only this machine uses the store.
        world_size: the number of workers that may connect at once.

    Attributes:
        host, port: the address for workers; port 0: `host` is the name of an abstract unix socket
        secret: 32 bytes that workers have to prove
    """

    def __init__(self, address: str, world_size: int = 0) -> None:
        self.secret = secrets.token_bytes(32)
        self.host, self.port = address, 0
        if address == LOOPBACK:
            self.host, self._sockets = bind_here()
        else:
            self._sockets = bind("", 0)
            self.port = int(self._sockets[0].getsockname()[1])
        self._rejected = RejectedConnections("the store for dumps")
        # Between proof and first message gloo looks up addresses, and name servers may be slow.
        self._listener = AgentListener[Keep | Ask](
            self.secret,
            None,
            self._rejected,
            self._serve,
            _first,
            first_at_once=False,
            further_connections=world_size,
        )
        self._groups: dict[str, dict[str, bytes]] = {}  # by key prefix
        self._changed = asyncio.Event()

    def start(self) -> None:
        self._listener.serve(self._sockets)

    async def close(self) -> None:
        await self._listener.close()
        self._rejected.close()
        for store_socket in self._sockets:
            store_socket.close()

    async def _serve(
        self, first: Keep | Ask, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Answer a worker until its connection ends."""
        told_keys: set[str] = set()
        message = first
        try:
            while True:
                if isinstance(message, Keep):
                    self._group(message.key)[message.key] = message.value
                    changed, self._changed = self._changed, asyncio.Event()
                    changed.set()
                else:
                    while message.key not in self._group(message.key):
                        await self._changed.wait()
                    writer.write(wire.frame(Kept(self._for(message.key, told_keys))))
                    await writer.drain()
                message = await wire.read(reader, to_store, wire.SLOW_S)
        except (EOFError, OSError, msgspec.DecodeError):
            return  # the operating system reports the death of the worker

    def _group(self, key: str) -> dict[str, bytes]:
        return self._groups.setdefault(key.rpartition("/")[0], {})

    def _for(self, key: str, told_keys: set[str]) -> dict[str, bytes]:
        """Return the value of `key`, and values of the same group that the connection has not received."""
        group = self._group(key)
        values, size = {key: group[key]}, len(group[key])
        for name, value in group.items():
            if name not in told_keys and name != key:
                size += len(value)
                if size > AHEAD_BYTES:
                    break
                values[name] = value
        told_keys.update(values)
        return values


async def _first(reader: asyncio.StreamReader) -> Keep | Ask | None:
    return await wire.read(reader, to_store)
