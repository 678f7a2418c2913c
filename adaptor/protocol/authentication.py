"""The proof by which two agents show each other that they know the job's secret, before any message.

The controller sends a nonce. The agent answers with a nonce of its own and its proof: a digest, under the
secret, of its role and both nonces. Only then does the controller prove itself: a client without the secret
gets nothing but a random number. Both nonces are new with every connection, so a recorded proof is useless on
another one. The role is part of the digest, so a proof cannot be sent back to its sender. With TLS all of
this goes through the encrypted channel.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import struct
from typing import Protocol

from adaptor.protocol.wire import exactly

_NONCE_BYTES = 32
_PROOF_BYTES = 32


async def challenge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The controller's side, up to where it knows that the other side is an agent of this job.

    The answer that lets the agent know as much is on its way when this returns: who has it is not shut out.

    Raises:
        ConnectionError: the other side does not know the secret.
    """
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own_nonce)
    theirs = await reader.readexactly(_NONCE_BYTES)
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"agent", own_nonce, theirs)):
        raise ConnectionError("the other side does not know the secret of this job")
    writer.write(_proof(secret, b"controller", own_nonce, theirs))


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The agent's side.

    Raises:
        ConnectionError: the other side does not know the secret.
        EOFError: it does not take the proof.
    """
    theirs = await reader.readexactly(_NONCE_BYTES)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own_nonce + _proof(secret, b"agent", theirs, own_nonce))
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"controller", theirs, own_nonce)):
        raise ConnectionError("the other side does not know the secret of this job")


def answer_blocking(connection: socket.socket, secret: bytes) -> None:
    """Do what `answer` does, over a blocking socket.

    Raises:
        ConnectionError, EOFError: as there.
    """
    theirs = exactly(connection, _NONCE_BYTES)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own_nonce + _proof(secret, b"agent", theirs, own_nonce))
    proof = exactly(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"controller", theirs, own_nonce)):
        raise ConnectionError("the other side does not know the secret of this job")


def _proof(secret: bytes, role: bytes, controllers: bytes, agents: bytes) -> bytes:
    return hmac.digest(secret, role + controllers + agents, "sha256")


class Socket(Protocol):
    """A socket, or the part of one that asyncio shows."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


_CREDENTIALS = "3i"  # pid, uid, gid


def is_same_user(connection: Socket) -> bool:
    """Return whether the process on the other side of `connection` has this process's user."""
    peer_credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
    )
    return bool(struct.unpack(_CREDENTIALS, peer_credentials)[1] == os.getuid())
