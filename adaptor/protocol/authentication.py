"""The proofs of the other side of a connection: the job's secret between agents, the user on a unix socket.

The controller sends a nonce. The agent answers with a nonce of its own and its proof: a digest, under the
secret, of its role and both nonces. Only then does the controller prove itself: a client without the secret
gets nothing but a random number. Both nonces are new with every connection, so a recorded proof is useless on
another connection. The role is part of the digest, so a proof cannot be sent back to its sender. With TLS the
whole exchange goes through the encrypted channel.

Abstract sockets have no permissions, but the kernel knows the users of both sides (`is_same_user`): an
accepting process sees the user of the connecting process, and a connecting process sees the user of the
process that called `listen`.
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
    """Prove the controller's side, after the other side has proved to be an agent of this job.

    The answer with the controller's proof is under way on return.

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
    """Prove the agent's side.

    Raises:
        ConnectionError: the other side does not know the secret.
        EOFError: the other side rejects the proof.
    """
    theirs = await reader.readexactly(_NONCE_BYTES)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own_nonce + _proof(secret, b"agent", theirs, own_nonce))
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"controller", theirs, own_nonce)):
        raise ConnectionError("the other side does not know the secret of this job")


def answer_blocking(connection: socket.socket, secret: bytes) -> None:
    """Prove the agent's side like `answer`, over a blocking socket.

    Raises:
        ConnectionError, EOFError: as `answer`.
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
    """A socket, or asyncio's view of a socket."""

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


_CREDENTIALS = "3i"  # pid, uid, gid


def is_same_user(connection: Socket) -> bool:
    """Return True if the process on the other side of `connection` has the user of this process."""
    peer_credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
    )
    return bool(struct.unpack(_CREDENTIALS, peer_credentials)[1] == os.getuid())
