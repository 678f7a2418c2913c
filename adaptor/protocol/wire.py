"""Framing, and the proofs of both sides of a connection.

A frame is four bytes of length, then one msgpack message of a known type. Nothing is ever unpickled.

Between agents the job's secret is proved. The controller sends a nonce. The agent answers with a nonce of its
own and its proof: a digest, under the secret, of its role and both nonces. Only then does the controller
prove itself, so a client without the secret gets nothing but a random number. Both nonces are new with every
connection, so a recorded proof is useless on another connection; the role in the digest prevents that a proof
is sent back to its sender. Abstract unix sockets have no permissions, but the kernel knows the users of both
sides (`is_same_user`): the user of the connecting process, and of the process that called `listen`.

The loss of a machine is noticed because its kernel no longer answers TCP keepalives (`notice_silence`). A
stopped process on a live machine is not noticed so.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from adaptor import text
from adaptor.protocol.messages import (
    Addressed,
    ControllerToAgent,
    Dump,
    FromAgent,
    FromWorker,
    Message,
    ToWorker,
)

# The largest messages are lists of files: some hundred bytes each, thousands of them.
MAX_SIZE = 16 * 1024 * 1024
_LENGTH_BYTES = 4
# Between machines: an announced message arrives within this time. The largest message would, at half a
# megabyte a second. Only this limit ends the connection of a process that is stopped in the middle of a
# message: its kernel still answers keepalives.
SLOW_S = 30.0
# Between machines, the kernel asks the kernel of the other side after this time without data, and again after
# the same time. Processes send no signs of life: 12,500 nodes with a sign every half second would take most
# of a core of the controller. TCP_KEEPIDLE and TCP_KEEPINTVL are whole seconds.
ASK_S = 1
# The time within which the kernel of the other side answers, however busy its processes are; so a slow node
# does not count as lost. By then two questions, or data sent at about 0, 0.2, 0.6 and 1.4 s, have had no
# answer, so one lost packet is no silence. The kernel looks when it would ask again: a lost node is noticed 2
# to 3 s after its loss.
SILENT_S = 2.5
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CREDENTIALS = "3i"  # pid, uid, gid

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def deadline(seconds: float) -> AbstractAsyncContextManager[object]:
    """Return `asyncio.timeout` (3.11 and later), or an equivalent on 3.10; raises asyncio.TimeoutError."""
    if hasattr(asyncio, "timeout"):
        timer: AbstractAsyncContextManager[object] = asyncio.timeout(seconds)
        return timer
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._expired and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError


class Decoder(Generic[T]):
    """Decodes one direction of the conversation; any other content raises `msgspec.DecodeError`."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder

    def __call__(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (UnicodeDecodeError, RecursionError) as error:  # invalid text, endless nesting
            raise msgspec.DecodeError(str(error)) from None


from_worker: Decoder[FromWorker] = Decoder(msgspec.msgpack.Decoder(FromWorker))
to_worker: Decoder[ToWorker] = Decoder(msgspec.msgpack.Decoder(ToWorker))
from_agent: Decoder[FromAgent] = Decoder(msgspec.msgpack.Decoder(FromAgent))
to_agent: Decoder[ControllerToAgent] = Decoder(msgspec.msgpack.Decoder(ControllerToAgent))


def frame(message: Message) -> bytes:
    """Return the bytes of `message` for a stream."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:  # a name that is not UTF-8
        body = _encoder.encode(_encodable(message))
    if len(body) > MAX_SIZE:  # the other side would close the connection
        body = _encoder.encode(_encodable(message, text.LINE))
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class OrderFrames:
    """Frames orders for many agents; a dump with several ranks is encoded once."""

    def __init__(self) -> None:
        # By the id of the order, which is kept, so that the id is not used again.
        self._encoded: dict[int, tuple[Dump, msgspec.Raw]] = {}

    def __call__(self, orders: Sequence[ControllerToAgent]) -> bytes:
        """Return the bytes of `orders` for one stream."""
        return b"".join(map(self._frame, orders))

    def forget(self) -> None:
        """Forget the encoded dumps, which are not ordered again."""
        self._encoded.clear()

    def _frame(self, order: ControllerToAgent) -> bytes:
        if type(order) is not Addressed or type(order.message) is not Dump:
            return frame(order)
        known_frame = self._encoded.get(id(order.message))
        if known_frame is None:
            body = frame(order.message)[_LENGTH_BYTES:]
            known_frame = self._encoded[id(order.message)] = (order.message, msgspec.Raw(body))
        return frame(Addressed(order.rank, cast("ToWorker", known_frame[1])))


def _encodable(value: Any, limit: int = MAX_SIZE) -> Any:
    """Return `value` with every text made encodable, and cut to `limit` characters."""
    match value:
        case str():
            return text.encodable(value, limit)
        case msgspec.Struct():
            fields = {name: _encodable(getattr(value, name), limit) for name in value.__struct_fields__}
            return msgspec.structs.replace(value, **fields)
        case tuple() | list():
            return tuple(_encodable(element, limit) for element in value)
        case dict():
            return {_encodable(key, limit): _encodable(element, limit) for key, element in value.items()}
        case _:
            return value


def _checked(length: int) -> int:
    if length > MAX_SIZE:
        raise ConnectionError(f"a message of {length} bytes is announced: at most {MAX_SIZE} are read")
    return length


async def read(stream: asyncio.StreamReader, decode: Decoder[T], slow_s: float | None = None) -> T:
    """Return the next message of `stream`, `slow_s` seconds after its beginning at the latest.

    Raises EOFError (the other side is gone), ConnectionError or msgspec.DecodeError (the bytes are no
    message, or came too slowly).
    """
    length = _checked(int.from_bytes(await stream.readexactly(_LENGTH_BYTES), "big"))
    if slow_s is None:
        return decode(await stream.readexactly(length))
    try:
        async with deadline(slow_s):
            body = await stream.readexactly(length)
    except asyncio.TimeoutError:
        raise ConnectionError(f"a message of {length} bytes was not there after {slow_s:g} s") from None
    return decode(body)


def receive(connection: socket.socket, decode: Decoder[T]) -> T:
    """Return the next message of a blocking socket; raises like `read`."""
    length = _checked(int.from_bytes(exactly(connection, _LENGTH_BYTES), "big"))
    return decode(exactly(connection, length))


def exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes of a blocking socket; raise EOFError if the stream ends before."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError("the other side closed the connection")
        parts += part
    return bytes(parts)


class Keep(Message, frozen=True):
    """Worker to store: keep `value` under `key`."""

    key: str
    value: bytes


class Ask(Message, frozen=True):
    """Worker to store: answer `Kept` as soon as `key` has a value."""

    key: str


class Kept(Message, frozen=True):
    """Store to worker: the value of the key in `Ask`, and of further keys that the worker will ask for."""

    values: dict[str, bytes]


to_store: Decoder[Keep | Ask] = Decoder(msgspec.msgpack.Decoder(Keep | Ask))
from_store: Decoder[Kept] = Decoder(msgspec.msgpack.Decoder(Kept))


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel end a TCP connection whose other side is powered off or cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))


async def prove_controller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove the controller's side, after the other side has proved to be an agent of this job.

    The proof is under way on return. Raises ConnectionError if the other side lacks the secret.
    """
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own_nonce)
    theirs = await reader.readexactly(_NONCE_BYTES)
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"agent", own_nonce, theirs)):
        raise ConnectionError("the other side does not know the secret of this job")
    writer.write(_proof(secret, b"controller", own_nonce, theirs))


async def prove_agent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """Prove the agent's side. Raises ConnectionError (no secret), EOFError (the proof is rejected)."""
    theirs = await reader.readexactly(_NONCE_BYTES)
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    writer.write(own_nonce + _proof(secret, b"agent", theirs, own_nonce))
    proof = await reader.readexactly(_PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"controller", theirs, own_nonce)):
        raise ConnectionError("the other side does not know the secret of this job")


def prove_agent_blocking(connection: socket.socket, secret: bytes) -> None:
    """Prove the agent's side like `prove_agent`, over a blocking socket."""
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


def is_same_user(connection: Socket) -> bool:
    """Return True if the process on the other side of `connection` has the user of this process."""
    peer_credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_CREDENTIALS)
    )
    return bool(struct.unpack(_CREDENTIALS, peer_credentials)[1] == os.getuid())
