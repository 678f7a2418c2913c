"""Connections between agents and the controller: `AgentListener` accepts, `connect` makes them.

Both sides prove the job's secret before any other message (`adaptor.protocol.wire`). Between
machines agents connect over TCP. On one machine they connect to an abstract unix socket, which has no
permissions; the kernel gives each side the user of the other, and only the same user is accepted.

Invariants: no bytes are decoded before the proof of the job's secret; at most `MOST` unproved connections
are open, and the oldest is closed for a new connection, so that a flood keeps no agent out; a proved
connection is never closed for another. An agent whose connection was closed tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import secrets
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

import msgspec

from adaptor.controller.failover import TRY_CONNECT_TIMEOUT_S
from adaptor.errors import StartError
from adaptor.launchers.control.credentials import UNIX, Tls
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello, Endpoint
from adaptor.protocol.wire import deadline, is_same_user

_log = logging.getLogger("adaptor")

# A port scan or a flood makes thousands of connections, which must not fill the log.
LINE_S = 60.0
# The time for the proof of the secret; an agent needs a few round trips.
HANDSHAKE_S = 10.0
# The most open connections without a proof, or a quarter of the process's descriptors, if less. An agent
# needs a few milliseconds for its proof. Each connection costs half a megabyte of buffers.
MOST = 256
# The pause between two attempts of an agent.
PAUSE_S = 0.2
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOOPBACK = "127.0.0.1"
BACKLOG = 1024  # all nodes of a large job connect at once
# The time limit for connecting. The controller listens before its address is published, so only a flood or a
# starting network can keep the agent out.
CONNECT_TIMEOUT_S = 30.0
# The time for TLS and the proof after the other side's kernel has accepted the connection: in a large job
# thousands of agents connect at once.
PROOF_S = 5.0
# An entry of `getaddrinfo`: family, kind, protocol, canonical name, socket address.
_Address = tuple[
    socket.AddressFamily,
    socket.SocketKind,
    int,
    str,
    tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes],
]


class RejectedConnections:
    """The counter of rejected connections of a listener, on the agent's control thread.

    Logs at most one line a minute, and one line at the end.

    Args:
        listener_place: the listener, in words for the log.

    Attributes:
        counted: the number of rejected connections for each reason
    """

    def __init__(self, listener_place: str) -> None:
        self._where = listener_place
        self.counted: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def count(self, rejection: str) -> None:
        """Count a rejected connection; `rejection`: the reason, as the predicate of a sentence."""
        self.counted[rejection] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LINE_S, self._log_counts)

    def close(self) -> None:
        """Log the counts that have not been logged."""
        if self._timer is not None:
            self._timer.cancel()
            self._log_counts()

    def _log_counts(self) -> None:
        self._timer = None
        counts_text = ", ".join(f"{number} {rejection}" for rejection, number in self.counted.most_common())
        _log.warning(
            "%d rejected connections at %s so far: %s", sum(self.counted.values()), self._where, counts_text
        )


# Reads the first message of an agent; None: an unexpected message.
T = TypeVar("T")
First = Callable[[asyncio.StreamReader], Awaitable[T | None]]
Welcome = Callable[[T, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def read_hello(reader: asyncio.StreamReader) -> AgentHello | None:
    """Return the first message of a connection; None for a message other than AgentHello."""
    hello = await wire.read(reader, wire.from_agent)
    return hello if isinstance(hello, AgentHello) else None


class AgentListener(Generic[T]):
    """Listens for agents, and passes each agent with a proof of the secret to `welcome`.

    Args:
        secret: the secret of this generation of the job, 32 bytes or more.
        welcome: serves a connection, after its first message, until the connection ends.
        first: reads the first message.
        first_at_once: the first message has to come within the time for the proof.
        further_connections: the number of clients of the job that may connect at once, besides `MOST`.
    """

    def __init__(
        self,
        secret: bytes,
        tls: Tls | None,
        rejected: RejectedConnections,
        welcome: Welcome[T],
        first: First[T],
        *,
        first_at_once: bool = True,
        further_connections: int = 0,
    ) -> None:
        self._first = first
        self._first_at_once = first_at_once
        self._secret = secret
        self._tls = tls
        self._rejected = rejected
        self._welcome = welcome
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = (
            MOST + further_connections
            if descriptors == resource.RLIM_INFINITY
            else min(MOST + further_connections, descriptors // 4)
        )
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproved: dict[asyncio.Task[None], None] = {}  # the oldest first

    def listen(self, address: str, port: int) -> int:
        """Accept connections at `address` (empty: all); return the port: `port` or the next free one.

        Raises:
            OSError: no port is free.
        """
        for candidate in range(port, 65536):
            try:
                self.serve(bind(address, candidate))
            except OSError:
                continue
            return candidate
        raise OSError(f"no free port from {port} on for the controller")

    def open(self, kind: str, address: str, port: int) -> Endpoint:
        """Accept connections; return the endpoint for other agents.

        Args:
            kind: of connections between agents (`credentials.kind_of`).
            address: of this node for other nodes.
            port: of TCP connections, or the next free port.
        """
        if kind == UNIX:
            name, listeners = bind_here()
            self.serve(listeners)
            return Endpoint(name, 0)
        return Endpoint(address, self.listen(LOOPBACK if address == LOOPBACK else "", port))

    def serve(self, listeners: list[socket.socket]) -> None:
        """Accept connections at the listeners, which are closed with this object."""
        self._listeners = listeners
        for listener in listeners:
            self._spawn(self._accept(listener))

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
            except OSError as error:  # a client may leave before `accept`
                if error.errno in EXHAUSTED:
                    self._turn_out(len(self._unproved))
                    await asyncio.sleep(PAUSE_S)  # other clients hold the descriptors
                continue
            if connection.family == socket.AF_UNIX and not is_same_user(connection):
                connection.close()
                self._rejected.count("were of another user")
                await asyncio.sleep(0)
                continue
            self._turn_out(len(self._unproved) + 1 - self._most)
            task = self._spawn(self._admit(connection))
            self._unproved[task] = None
            # `sock_accept` does not wait while the queue has connections: let other tasks run and closed
            # ones end.
            await asyncio.sleep(0)

    def _turn_out(self, count: int) -> None:
        """Close the oldest unproved connections."""
        for task in list(self._unproved)[: max(count, 0)]:
            del self._unproved[task]
            task.cancel()
            self._rejected.count("were closed for newer ones")

    async def _admit(self, connection: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer = None
        try:
            async with deadline(HANDSHAKE_S):
                if connection.family != socket.AF_UNIX:
                    wire.notice_silence(connection)
                certificates = await self._tls.newest() if self._tls is not None else None
                reader, writer = await _streams(connection, certificates and certificates.server)
                await wire.prove_controller(reader, writer, self._secret)
                self._unproved.pop(task, None)
                if self._first_at_once:
                    hello = await self._first(reader)
            if not self._first_at_once:
                hello = await self._first(reader)
            if hello is not None:
                await self._welcome(hello, reader, writer)
            else:
                self._rejected.count("knew the secret and said no hello")
        except asyncio.TimeoutError:
            self._rejected.count(f"had not proved themselves within {HANDSHAKE_S:g} s")
        except (EOFError, ConnectionResetError, ConnectionAbortedError, BrokenPipeError):
            self._rejected.count("went without a proof")
        except ssl.SSLError:
            self._rejected.count("had no certificate of this job")
        except (OSError, msgspec.DecodeError):
            self._rejected.count("did not know the secret")
        finally:
            self._unproved.pop(task, None)
            if writer is None:
                connection.close()
            else:
                writer.close()


def bind(address: str, port: int) -> list[socket.socket]:
    """Return listening sockets, on IPv6 too if available; port 0: the same free port for both."""
    listeners = [socket.create_server((address, port), backlog=BACKLOG)]
    port = int(listeners[0].getsockname()[1])
    if not address and socket.has_ipv6:
        try:
            listeners.append(socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # an agent might connect to another program
                listeners[0].close()
                raise
    for listener in listeners:
        listener.setblocking(False)
    return listeners


def bind_here() -> tuple[str, list[socket.socket]]:
    """Return the name of a listening abstract unix socket, and the socket."""
    name = f"ttp-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{name}")
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return name, [listener]


async def _streams(
    connection: socket.socket, tls: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Make the streams of a connection, as `asyncio.start_server` does.

    `start_server` itself makes the TLS handshake before the connection can be counted.
    """
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, ssl=tls)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def connect(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the controller as its agent; both sides have proved the secret on return.

    Args:
        address, port: of an `Endpoint`; with port 0 `address` is the name of an abstract unix socket.

    Raises:
        StartError: no connection within `CONNECT_TIMEOUT_S`, or the certificates do not fit.
    """
    reason = ""
    try:
        async with deadline(CONNECT_TIMEOUT_S):
            while True:
                try:
                    return await _prove(await _reach(address, port), address, secret, tls)
                except (EOFError, ssl.SSLEOFError):
                    reason = "it shuts the connection"
                except ssl.SSLError as error:
                    raise StartError(_unreachable(address, port, _reason_of(error))) from None
                except OSError as error:
                    reason = str(error)
                await asyncio.sleep(PAUSE_S)
    except asyncio.TimeoutError:
        raise StartError(_unreachable(address, port, reason or "it does not answer")) from None


async def try_connect(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Connect like `connect` to a node that may be lost.

    Returns:
        The connection; None without a listener, after TRY_CONNECT_TIMEOUT_S of silence of the machine, or
            after PROOF_S of silence of the process.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        async with deadline(CONNECT_TIMEOUT_S):
            while True:
                try:
                    async with deadline(TRY_CONNECT_TIMEOUT_S):
                        connection = await _reach(address, port)
                    async with deadline(PROOF_S):
                        return await _prove(connection, address, secret, tls)
                except (EOFError, ConnectionResetError, BlockingIOError, ssl.SSLEOFError):
                    # Closed for a newer connection: all nodes of a job connect at once.
                    await asyncio.sleep(PAUSE_S)
                except (OSError, asyncio.TimeoutError):  # errors of TLS are OSErrors, too
                    return None
    return None


async def _reach(address: str, port: int) -> socket.socket:
    """Return a connection accepted by the other side's kernel; the process may not know of it yet."""
    if port == 0:
        return _reach_here(address)
    loop = asyncio.get_running_loop()
    failure: OSError | None = None
    for family, kind, protocol, _, socket_address in await _addresses(address, port):
        try:
            connection = socket.socket(family, kind, protocol)
        except OSError as error:  # the machine lacks the address family
            failure = failure or error
            continue
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, socket_address)
            wire.notice_silence(connection)
        except OSError as error:
            connection.close()
            failure = failure or error
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise failure or OSError(f"{address} has no address")


async def _addresses(address: str, port: int) -> Sequence[_Address]:
    """Return the socket addresses of `address`."""
    try:  # a numeric address needs no thread of the pool, which may be busy
        return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        return await asyncio.get_running_loop().getaddrinfo(address, port, type=socket.SOCK_STREAM)


def _reach_here(name: str) -> socket.socket:
    """Connect to the abstract unix socket `name` of an agent of the same user.

    Raises:
        BlockingIOError: the queue of the listener is full.
        ConnectionError: nobody listens, or another user does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")  # asyncio would take a full queue for a connection
        if not is_same_user(connection):
            raise ConnectionError("another user listens there")
    except BaseException:
        connection.close()
        raise
    return connection


async def _prove(
    connection: socket.socket, address: str, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Make the streams of `connection`, and have both sides prove the secret; close on failure."""
    context = None
    if tls is not None and connection.family != socket.AF_UNIX:
        try:
            context = (await tls.newest()).client
        except BaseException:
            connection.close()
            raise
    reader, writer = await asyncio.open_connection(
        sock=connection, ssl=context, server_hostname=address if context is not None else None
    )
    try:
        await wire.prove_agent(reader, writer, secret)
    except BaseException:
        writer.close()
        raise
    return reader, writer


def _reason_of(error: ssl.SSLError) -> str:
    return getattr(error, "verify_message", None) or f"TLS: {error.reason}"


def _unreachable(address: str, port: int, reason: str) -> str:
    if port == 0:
        return (
            f"the controller at the socket {address} of this machine cannot be reached: {reason} (without"
            " certificates all ttprun of a job run on one machine, as the same user)"
        )
    return (
        f"the controller at {address} port {port} cannot be reached: {reason}"
        " (TTP_TLS and TTP_TLS_CA must mean the same on every node; with --rdzv-backend c10d a node is"
        " reached by its host name, or by what --local-addr says there)"
    )
