"""The gate: where agents of other nodes come to the controller, and strangers are kept out.

Invariants: nobody's bytes are decoded before the proof of the job's secret; at most `MOST` connections that
have not proved it are open, and the oldest of them goes for a new one, so that no flood keeps an agent out;
who has proved it is never turned out for another. An agent that a flood has pushed out knocks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable

import msgspec

from adaptor.control import wire
from adaptor.control.deadline import deadline
from adaptor.control.messages import AgentHello
from adaptor.control.take_over import REACH_S
from adaptor.errors import StartError
from adaptor.launchers import proof
from adaptor.launchers.strangers import Strangers
from adaptor.launchers.tls import Tls

# A stranger has this long to prove the secret; an agent needs a few round trips.
HANDSHAKE_S = 10.0
# So many strangers are waited for, or a quarter of the descriptors that this process may have. An agent is
# one for a few milliseconds. Each costs half a megabyte of buffers at most.
MOST = 256
# So long an agent knocks: the controller listens before its address is told, so all that can keep it out is a
# flood, or a network that has just come up.
KNOCK_S = 30.0
# Between two knocks. A flood that turns everyone out within that time has to be a fast one.
PAUSE_S = 0.2
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOOPBACK = "127.0.0.1"

Welcome = Callable[[AgentHello, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Gate:
    """Listens for agents. `welcome` hears one that has proved the secret and said hello, to its end."""

    def __init__(self, secret: bytes, tls: Tls | None, strangers: Strangers, welcome: Welcome) -> None:
        self._secret = secret
        self._tls = tls
        self._strangers = strangers
        self._welcome = welcome
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if descriptors == resource.RLIM_INFINITY else min(MOST, descriptors // 4)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved: dict[asyncio.Task[None], None] = {}  # in the order in which they came

    def listen(self, address: str, port: int) -> int:
        """Accept connections at `address` (empty: all), at `port` or the next free one, which is returned."""
        for candidate in range(port, 65536):
            try:
                self._listeners = _bind(address, candidate)
            except OSError:
                continue
            for listener in self._listeners:
                self._spawn(self._accept(listener))
            return candidate
        raise OSError(f"no free port from {port} on for the controller")

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:  # else it was gone before it was accepted
                if error.errno in _EXHAUSTED:
                    self._turn_out(len(self._unproved))
                    await asyncio.sleep(PAUSE_S)  # it is others who hold the descriptors
                continue
            self._turn_out(len(self._unproved) + 1 - self._most)
            task = self._spawn(self._admit(connection))
            self._unproved[task] = None
            # Accepting is no wait while there is a queue: let the others act, and who was turned out go.
            await asyncio.sleep(0)

    def _turn_out(self, count: int) -> None:
        """The oldest of those that have not proved the secret."""
        for task in list(self._unproved)[: max(count, 0)]:
            del self._unproved[task]
            task.cancel()
            self._strangers.count("were turned out for others")

    async def _admit(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer = None
        try:
            async with deadline(HANDSHAKE_S):
                wire.notice_silence(connection)
                reader, writer = await _streams(connection, self._tls and self._tls.server)
                await proof.ask(reader, writer, self._secret)
                self._unproved.pop(task, None)
                hello = await wire.read(reader, wire.from_agent)
            if isinstance(hello, AgentHello):
                await self._welcome(hello, reader, writer)
            else:
                self._strangers.count("knew the secret and said no hello")
        except asyncio.TimeoutError:
            self._strangers.count(f"had not proved themselves within {HANDSHAKE_S:g} s")
        except (EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
            self._strangers.count("went without a proof")
        except ssl.SSLError:
            self._strangers.count("had no certificate of this job")
        except (OSError, msgspec.DecodeError):
            self._strangers.count("did not know the secret")
        finally:
            self._unproved.pop(task, None)
            if writer is None:
                connection.close()
            else:
                writer.close()


async def knock(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The agent's side: a connection to the controller, both sides proved.

    Raises:
        StartError: there is none within `KNOCK_S`, or certificates do not fit.
    """
    reason = ""
    try:
        async with deadline(KNOCK_S):
            while True:
                try:
                    return await _knock_once(address, port, secret, tls)
                except (EOFError, ssl.SSLEOFError):
                    reason = "it shuts the connection"
                except ssl.SSLError as error:
                    raise StartError(_no_way(address, port, _said_by(error))) from None
                except OSError as error:
                    reason = str(error)
                await asyncio.sleep(PAUSE_S)
    except asyncio.TimeoutError:
        raise StartError(_no_way(address, port, reason or "it does not answer")) from None


async def reach(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """The agent's side, where nobody may be left: None then, at once, or after `REACH_S` of silence."""
    with contextlib.suppress(asyncio.TimeoutError):
        async with deadline(KNOCK_S):
            while True:
                try:
                    async with deadline(REACH_S):
                        return await _knock_once(address, port, secret, tls)
                except (EOFError, ConnectionResetError, ssl.SSLEOFError):
                    await asyncio.sleep(PAUSE_S)  # turned out for another: all nodes of a job come at once
                except (OSError, asyncio.TimeoutError):  # errors of TLS are OSErrors, too
                    return None
    return None


async def _knock_once(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(address, port, ssl=tls and tls.client)
    try:
        wire.notice_silence(writer.get_extra_info("socket"))
        await proof.give(reader, writer, secret)
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _said_by(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", None) or f"TLS: {error.reason}"


def _no_way(address: str, port: int, reason: str) -> str:
    return (
        f"the controller at {address} port {port} cannot be reached: {reason}"
        " (TTP_TLS and TTP_TLS_CA must mean the same on every node; with --rdzv-backend c10d a node is"
        " reached by its host name, or by what --local-addr says there)"
    )


def _bind(address: str, port: int) -> list[socket.socket]:
    """Sockets that listen, on IPv6 as well where the machine has it."""
    backlog = 1024  # every node of a large job comes at once
    listeners = [socket.create_server((address, port), backlog=backlog)]
    if not address and socket.has_ipv6:
        try:
            listeners.append(socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # an agent might come to somebody else
                listeners[0].close()
                raise
    for listener in listeners:
        listener.setblocking(False)
    return listeners


async def _streams(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """What `asyncio.start_server` makes; but there a TLS handshake is done before anyone can count it."""
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
