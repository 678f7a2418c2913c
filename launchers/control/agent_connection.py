"""Connects an agent with the controller, or with a standby node.

Both sides prove the job's secret before any other message (`adaptor.protocol.authentication`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence

from adaptor.controller.failover import TRY_CONNECT_TIMEOUT_S
from adaptor.errors import StartError
from adaptor.launchers.control.agent_listener import PAUSE_S
from adaptor.launchers.control.tls import Tls
from adaptor.protocol import authentication, wire
from adaptor.protocol.authentication import is_same_user
from adaptor.protocol.deadline import deadline

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
            after
        PROOF_S of silence of the process.
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
                    await asyncio.sleep(
                        PAUSE_S
                    )  # closed for a newer connection: all nodes of a job connect at once
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
    """Return the socket addresses of `address`; a numeric address needs no thread of the pool, which may
    be busy.
    """
    try:
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
        await authentication.answer(reader, writer, secret)
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
