"""Connects an agent with the controller, or with a node that stands by.

Both sides have proved the job's secret before anything else is said (`adaptor.protocol.authentication`).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl

from adaptor.controller.failover import TRY_CONNECT_TIMEOUT_S
from adaptor.errors import StartError
from adaptor.launchers.agent_listener import PAUSE_S
from adaptor.launchers.tls import Tls
from adaptor.protocol import authentication, silence
from adaptor.protocol.deadline import deadline
from adaptor.protocol.peer import is_same_user

# How long an agent tries to connect. The controller listens before its address is published, so only a flood,
# or a network that has just come up, can keep the agent out.
CONNECT_TIMEOUT_S = 30.0


async def connect(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the controller, as its agent does; both sides have proved the secret on return.

    Args:
        address, port: of an `Endpoint`; with port 0 `address` is the name of an abstract unix socket.
        secret: the secret of this generation of the job.
        tls: the certificates of this node; None: without TLS.

    Raises:
        StartError: no connection within `CONNECT_TIMEOUT_S`, or the certificates do not fit.
    """
    reason = ""
    try:
        async with deadline(CONNECT_TIMEOUT_S):
            while True:
                try:
                    return await _connect_once(address, port, secret, tls)
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
    """Connect like `connect` to `address` and `port`, of a node that may be lost.

    Returns:
        The connection; None if nobody listens there, or after TRY_CONNECT_TIMEOUT_S of silence.
    """
    with contextlib.suppress(asyncio.TimeoutError):
        async with deadline(CONNECT_TIMEOUT_S):
            while True:
                try:
                    async with deadline(TRY_CONNECT_TIMEOUT_S):
                        return await _connect_once(address, port, secret, tls)
                except (EOFError, ConnectionResetError, BlockingIOError, ssl.SSLEOFError):
                    await asyncio.sleep(PAUSE_S)  # closed for a newer one: all nodes of a job come at once
                except (OSError, asyncio.TimeoutError):  # errors of TLS are OSErrors, too
                    return None
    return None


async def _connect_once(
    address: str, port: int, secret: bytes, tls: Tls | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if port == 0:
        reader, writer = await _connect_here(address)
    else:
        certificates = await tls.newest() if tls is not None else None
        reader, writer = await asyncio.open_connection(
            address, port, ssl=certificates and certificates.client
        )
        silence.notice(writer.get_extra_info("socket"))
    try:
        await authentication.answer(reader, writer, secret)
    except BaseException:
        writer.close()
        raise
    return reader, writer


async def _connect_here(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the abstract unix socket `name` of an agent of the same user.

    Raises:
        BlockingIOError: more wait there than the kernel queues.
        ConnectionError: nobody listens, or another user does.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(f"\0{name}")  # not by asyncio, which takes a full queue for a connection
        if not is_same_user(connection):
            raise ConnectionError("another user listens there")
        return await asyncio.open_unix_connection(sock=connection)
    except BaseException:
        connection.close()
        raise


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
