"""Framing: four bytes of length, then one msgpack message of a known type. Nothing is ever unpickled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from adaptor import text
from adaptor.protocol import wire
from adaptor.protocol.deadline import deadline
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
# Between machines: once a message has been announced, it comes within this time. The largest would, at half a
# megabyte a second; the kernel answers for a sender that has stopped, so silence alone does not tell.
SLOW_S = 30.0

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class Decoder(Generic[T]):
    """Decodes one direction of the conversation; anything else raises `msgspec.DecodeError`."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._decoder = decoder

    def __call__(self, body: bytes) -> T:
        try:
            return self._decoder.decode(body)
        except (UnicodeDecodeError, RecursionError) as error:  # text that is none, nesting without end
            raise msgspec.DecodeError(str(error)) from None


from_worker: Decoder[FromWorker] = Decoder(msgspec.msgpack.Decoder(FromWorker))
to_worker: Decoder[ToWorker] = Decoder(msgspec.msgpack.Decoder(ToWorker))
from_agent: Decoder[FromAgent] = Decoder(msgspec.msgpack.Decoder(FromAgent))
to_agent: Decoder[ControllerToAgent] = Decoder(msgspec.msgpack.Decoder(ControllerToAgent))


def frame(message: Message) -> bytes:
    """`message` as it goes over a stream."""
    try:
        body = _encoder.encode(message)
    except UnicodeEncodeError:  # a name that is no UTF-8
        body = _encoder.encode(_encodable(message))
    if len(body) > MAX_SIZE:  # the other side would shut the connection
        body = _encoder.encode(_encodable(message, text.LINE))
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class OrderFrames:
    """Frames orders for many agents; a dump that several ranks take part in is encoded once."""

    def __init__(self) -> None:
        # By the id of the order, which is kept, so that no other has it.
        self._encoded: dict[int, tuple[Dump, msgspec.Raw]] = {}

    def __call__(self, orders: Sequence[ControllerToAgent]) -> bytes:
        """Return `orders` as they go over one stream."""
        return b"".join(map(self._frame, orders))

    def forget(self) -> None:
        """Forget what was encoded: it is not ordered again."""
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
    """Return `value` with every text in it made encodable, and cut to `limit` characters."""
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

    Args:
        stream: the connection.
        decode: makes the message of its bytes.
        slow_s: None: there is no limit.

    Raises:
        EOFError: the other side is gone (`asyncio.IncompleteReadError` is one).
        ConnectionError, msgspec.DecodeError: what came is no message, or came too slowly.
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
    """The next message of a blocking socket; raises like `read`."""
    length = _checked(int.from_bytes(exactly(connection, _LENGTH_BYTES), "big"))
    return decode(exactly(connection, length))


def exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next `count` bytes of a blocking socket; raise EOFError where it ends before."""
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
    """Worker to store: answer `Kept` as soon as there is something under `key`."""

    key: str


class Kept(Message, frozen=True):
    """Store to worker: what is under the key that it has asked for, and what else it will ask for."""

    values: dict[str, bytes]


to_store: wire.Decoder[Keep | Ask] = wire.Decoder(msgspec.msgpack.Decoder(Keep | Ask))
from_store: wire.Decoder[Kept] = wire.Decoder(msgspec.msgpack.Decoder(Kept))


# Between machines, the kernel asks the kernel of the other side after so long without data, and again after
# as long. Processes say nothing: 12,500 nodes that said every half second that they are there would take most
# of a core of the controller. TCP_KEEPIDLE and TCP_KEEPINTVL are whole seconds.
ASK_S = 1
# The time within which the kernel of the other side answers, however busy its processes are; so a slow node
# is not taken for a lost one. By then two questions, or data sent at about 0, 0.2, 0.6 and 1.4 s, have had no
# answer, so one lost packet is no silence. The kernel looks when it would ask again: a lost node is noticed 2
# to 3 s after its loss.
SILENT_S = 2.5


def notice_silence(connection: socket.socket) -> None:
    """Let the kernel end a TCP connection whose other side has fallen silent: powered off, or cut off.

    It sees that by what is sent and not acknowledged; where nothing is sent, it asks.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, ASK_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_S))
