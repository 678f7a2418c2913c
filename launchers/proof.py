"""How two agents prove to each other that they know the job's secret, before a message is read.

The controller sends a nonce. The agent answers with a nonce of its own and its proof: a digest, under the
secret, of its role and both nonces. Only then does the controller prove itself, so a stranger gets nothing
but a random number. Both nonces are new with every connection: what was recorded of one proves nothing on
another. The roles are part of what is digested: what one side says cannot be given back to it. With TLS all
of this goes through the encrypted channel.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets

_NONCE_BYTES = 32
_PROOF_BYTES = 32


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The controller's side, up to where it knows that the other side is an agent of this job.

    The answer that lets the agent know as much is on its way when this returns: who has it is not shut out.

    Raises:
        ConnectionError: the other side does not know the secret.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    writer.write(mine)
    theirs = await reader.readexactly(_NONCE_BYTES)
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"agent", mine, theirs)):
        raise ConnectionError("the other side does not know the secret of this job")
    writer.write(_proof(secret, b"controller", mine, theirs))


async def give(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The agent's side.

    Raises:
        ConnectionError: the other side does not know the secret.
        EOFError: it does not take the proof.
    """
    theirs = await reader.readexactly(_NONCE_BYTES)
    mine = secrets.token_bytes(_NONCE_BYTES)
    writer.write(mine + _proof(secret, b"agent", theirs, mine))
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"controller", theirs, mine)):
        raise ConnectionError("the other side does not know the secret of this job")


def _proof(secret: bytes, role: bytes, controllers: bytes, agents: bytes) -> bytes:
    return hmac.digest(secret, role + controllers + agents, "sha256")
