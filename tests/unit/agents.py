"""Stand-ins for agents that connect to the controller over the network."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Any

from adaptor.protocol import wire
from adaptor.protocol.messages import ControllerToAgent, StandbyState, Welcome


class Agent:
    """A connection to the controller host, as an agent has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, tls: ssl.SSLContext | None = None) -> Agent:
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=tls))

    @classmethod
    async def proven(cls, port: int, secret: str) -> Agent:
        """Return a connection that has proved the secret of the job."""
        agent = await cls.connect(port)
        await agent.prove(secret)
        return agent

    async def prove(self, secret: str) -> None:
        await wire.prove_agent(self.reader, self.writer, bytes.fromhex(secret))

    def say(self, *messages: Any) -> None:
        self.writer.write(b"".join(wire.frame(message) for message in messages))

    async def hears(self) -> ControllerToAgent:
        """The next order; what is passed on for later is none."""
        while True:
            message = await wire.read(self.reader, wire.to_agent)
            if not isinstance(message, Welcome | StandbyState):
                return message

    async def is_shut_out(self) -> bool:
        """Return whether the other side ends the connection without a message."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:  # it had not read all that was sent to it
            return True

    async def is_dropped(self) -> None:
        """Returns when the other side ends the connection, whatever it has passed on before."""
        with contextlib.suppress(ConnectionResetError):
            await self.reader.read()

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:  # the other side was faster
            pass
