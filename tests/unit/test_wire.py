"""What goes over a connection: every message comes back as it was, and nothing else comes through."""

from __future__ import annotations

import asyncio
import socket
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control import messages, wire
from adaptor.control.messages import Exit, Freeze, Hello, Message, Raised

DIRECTIONS = {
    "from_worker": (wire.from_worker, messages.FromWorker),
    "to_worker": (wire.to_worker, messages.ToWorker),
    "from_agent": (wire.from_agent, messages.FromAgent),
    "to_agent": (wire.to_agent, messages.ControllerToAgent),
}
# Everything that may come out of a reader of strangers' bytes.
REFUSALS = (EOFError, ConnectionError, ValueError)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    if kind in (int, float, str):
        return {
            int: st.integers(-(2**63), 2**63 - 1),
            float: st.floats(allow_nan=False),
            str: st.text(st.characters(exclude_categories=["Cs"], max_codepoint=0x3000), max_size=20),
        }[kind]
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return st.lists(any_of(parts[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(any_of(parts[0]), any_of(parts[1]), max_size=3)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([any_of(part) for part in parts])
    if kind is type(None):
        return st.none()
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})


CASES = [(direction, kind) for direction, (_, union) in DIRECTIONS.items() for kind in typing.get_args(union)]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    here, there = socket.socketpair()
    with here, there:
        yield here, there


def read(stream_bytes: bytes, decode: wire.Decoder[Any]) -> Any:
    """What the agent's reader makes of a stream that ends after these bytes."""

    async def act() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(stream_bytes)
        reader.feed_eof()
        return await wire.read(reader, decode)

    return asyncio.run(act())


def receive(stream_bytes: bytes, decode: wire.Decoder[Any]) -> Any:
    """What the worker's reader makes of it."""
    here, there = socket.socketpair()
    with here, there:
        here.sendall(stream_bytes)
        here.shutdown(socket.SHUT_WR)
        return wire.receive(there, decode)


def test_every_message_has_a_direction() -> None:
    everything = {
        kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)
    }
    sent = {kind for _, kind in CASES}
    assert everything - sent == {Message, messages.BoardRecord}, "a board travels inside of other messages"


@pytest.mark.parametrize(("direction", "kind"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_round_trip(direction: str, kind: type[Message]) -> None:
    decode, _ = DIRECTIONS[direction]

    @settings(max_examples=10)
    @given(any_of(kind))
    def check(message: Message) -> None:
        framed = wire.frame(message)
        assert int.from_bytes(framed[:4], "big") == len(framed) - 4
        assert decode(framed[4:]) == message

    check()


def test_messages_follow_each_other_over_a_socket(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    sent = [Freeze(n) for n in range(100)] + [Exit(7)]
    here.sendall(b"".join(wire.frame(message) for message in sent))
    assert [wire.receive(there, wire.to_worker) for _ in sent] == sent


def test_a_message_that_arrives_byte_by_byte() -> None:
    message = Raised(3, "ValueError: \u00e9", 1)

    async def act() -> Message:
        reader = asyncio.StreamReader()
        reading = asyncio.ensure_future(wire.read(reader, wire.from_worker))
        for byte in wire.frame(message):
            reader.feed_data(bytes([byte]))
            await asyncio.sleep(0)
        return await reading

    assert asyncio.run(act()) == message


@pytest.mark.parametrize("reader", [read, receive])
def test_a_truncated_message_is_the_end(reader: Any) -> None:
    framed = wire.frame(Raised(3, "boom", 1))
    for cut in range(len(framed)):
        with pytest.raises(EOFError):
            reader(framed[:cut], wire.from_worker)


@pytest.mark.parametrize("reader", [read, receive])
def test_a_large_message_is_read_up_to_the_limit(reader: Any) -> None:
    limit = wire.MAX_SIZE
    with pytest.raises(ConnectionError, match=f"{limit + 1} bytes is announced: at most {limit}"):
        reader((limit + 1).to_bytes(4, "big") + b"x", wire.from_worker)
    with pytest.raises(ConnectionError):
        reader(b"GET / HTTP/1.1\r\n\r\n", wire.from_worker)


def test_many_files_fit() -> None:
    entries = tuple(
        FileEntry(f"mp_rank_{n:05}_000/distrib_optim.pt", 1 << 40, "0" * 32, 3) for n in range(20_000)
    )
    message = messages.Publish(1, "/save", 10, entries, {}, 40_000)
    framed = wire.frame(message)
    assert read(framed, wire.to_agent) == message


@pytest.mark.parametrize(
    ("direction", "kind"), [("from_worker", Exit), ("to_worker", Hello), ("to_agent", Exit)]
)
def test_a_message_of_another_direction_is_refused(direction: str, kind: type[Message]) -> None:
    message = kind(1, 2) if kind is Hello else kind(1)
    with pytest.raises(msgspec.DecodeError):
        read(wire.frame(message), DIRECTIONS[direction][0])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_bytes_of_a_stranger(direction: str) -> None:
    decode, union = DIRECTIONS[direction]

    @settings(max_examples=60)
    @given(st.binary(max_size=64))
    def check(body: bytes) -> None:
        try:
            message = decode(body)
        except REFUSALS:
            return
        assert isinstance(message, typing.get_args(union))

    check()


def test_values_of_another_type_are_refused() -> None:
    for fields in (
        ["Hello"],
        ["Hello", 1],
        {"type": "Hello", "rank": "one", "pid": 2},
        {"type": "Goodbye"},
        7,
    ):
        with pytest.raises(msgspec.DecodeError):
            wire.from_worker(msgspec.msgpack.encode(fields))
