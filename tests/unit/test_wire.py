"""Framing and decoding: every message survives the round trip, and anything else is refused."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import socket
import tracemalloc
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptor.protocol import messages, wire
from adaptor.protocol.messages import (
    Addressed,
    BoardRecord,
    Died,
    Dump,
    Exit,
    Freeze,
    GroupOrder,
    Hello,
    Layout,
    Message,
    Phase,
    Raised,
    Share,
    Welcome,
)
from adaptor.protocol.naming import FileEntry
from tests.unit.any_message import any_of

DIRECTIONS = {
    "from_worker": (wire.from_worker, messages.FromWorker),
    "to_worker": (wire.to_worker, messages.ToWorker),
    "from_agent": (wire.from_agent, messages.FromAgent),
    "to_agent": (wire.to_agent, messages.ControllerToAgent),
}
# Examples per fuzz test.
EXAMPLES = int(os.environ.get("TTP_FUZZ_EXAMPLES", "100"))


CASES = [(direction, kind) for direction, (_, union) in DIRECTIONS.items() for kind in typing.get_args(union)]


@pytest.fixture
def socket_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, right = socket.socketpair()
    with first, right:
        yield first, right


def read(stream_bytes: bytes, decode: wire.Decoder[Any]) -> Any:
    """Decode a stream as the agent's asyncio reader does."""

    async def act() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(stream_bytes)
        reader.feed_eof()
        return await wire.read(reader, decode)

    return asyncio.run(act())


def receive(stream_bytes: bytes, decode: wire.Decoder[Any]) -> Any:
    """Decode a stream as the worker's socket reader does."""
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(stream_bytes)
        sender.shutdown(socket.SHUT_WR)
        return wire.receive(receiver, decode)


def test_the_protocol_modules_use_no_pickle() -> None:
    """Neither directly nor by torch's collectives of objects."""
    root = Path(wire.__file__).parents[2]
    folders = ("adaptor/protocol", "adaptor/controller", "adaptor/worker", "launchers")
    sources = [source for folder in folders for source in (root / folder).glob("*.py")]
    assert len(sources) > 40
    for source in sources:
        names = {
            getattr(node, field)
            for node in ast.walk(ast.parse(source.read_text()))
            for field in ("id", "attr", "name", "module")
            if isinstance(getattr(node, field, None), str)
        }
        risky = {
            name
            for name in names
            if re.search(r"pickle|marshal|shelve|(gather|broadcast|scatter)_object", name)
        }
        assert not risky, source


def test_every_message_has_a_direction() -> None:
    everything = {
        kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)
    }
    sent = {kind for _, kind in CASES}
    inside = {Message, messages.BoardRecord}  # a board travels inside of other messages
    assert everything - sent == inside | {messages.AgentLost}, "nobody says it of another"


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


def test_orders_that_many_ranks_get_are_framed_as_any_other() -> None:
    dump = Dump(1, 2, 7, "/save", (GroupOrder("mp_rank_00000", (0, 1), 0),), "host", 1, 120.0)
    orders = [Addressed(0, dump), Addressed(1, Freeze(1)), Addressed(2, dump), Welcome()]
    frames = wire.OrderFrames()
    assert frames(orders) == frames(orders) == b"".join(map(wire.frame, orders))
    frames.forget()
    changed = msgspec.structs.replace(dump, step=8)
    assert frames([Addressed(0, changed)]) == wire.frame(Addressed(0, changed))


def test_messages_follow_each_other_over_a_socket(socket_pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = socket_pair
    sent = [Freeze(n) for n in range(100)] + [Exit(7)]
    sender.sendall(b"".join(wire.frame(message) for message in sent))
    assert [wire.receive(receiver, wire.to_worker) for _ in sent] == sent


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
def test_a_truncated_message_raises_eof(reader: Any) -> None:
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
def test_mutilated_messages_decode_or_are_refused(direction: str) -> None:
    decode, union = DIRECTIONS[direction]

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.one_of(st.binary(max_size=64), mutilated(union)))
    def check(body: bytes) -> None:
        try:
            message = decode(body)
        except msgspec.DecodeError:
            return
        assert isinstance(message, typing.get_args(union))
        assert decode(wire.frame(message)[4:]) == message or "nan" in repr(message)

    check()


@st.composite
def mutilated(draw: st.DrawFn, union: Any) -> bytes:
    """Draw a message with some bytes changed, removed or inserted."""
    body = bytearray(wire.frame(draw(any_of(union)))[4:])
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(start + 4, len(body))))
        body[start:end] = draw(st.binary(max_size=4))
    return bytes(body)


@settings(max_examples=EXAMPLES)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_streams_decode_or_are_refused(stream: bytes, with_length: bool) -> None:
    if with_length:
        stream = len(stream).to_bytes(4, "big") + stream
    try:
        read(stream, wire.from_agent)
    except (EOFError, ConnectionError, msgspec.DecodeError):
        pass


# Small inputs that once caused, or could cause, something other than a refusal.
CORPUS = {
    "nested without end": b"\x82\xa4type\xaaAgentHello\xa4junk" + b"\x91" * 2_000_000,
    "text that is none": b"\x83\xa4type\xa5Leave\xa4node\x01\xa6signal\xa2\xff\xfe",
    "a tag that is no text": b"\x81\xa4type\xa5Le\xffve",
    "four billion ranks": b"\x83\xa4type\xaaAgentHello\xa4node\x01\xa5ranks\xdd\xff\xff\xff\xff",
    "four billion fields": b"\xdf\xff\xff\xff\xff\xa4type\xaaAgentHello",
    "four gigabytes of text": b"\x83\xa4type\xa5Leave\xa4node\x01\xa6signal\xdb\xff\xff\xff\xff",
    "an extension": b"\x82\xa4type\xa5Leave\xa4node\xc7\x0c\xff" + bytes(12),
    "no map": b"\xc1",
    "a rank below zero": b"\x83\xa4type\xa5Hello\xa4rank\xff\xa3pid\x01",
    "a rank above all": b"\x83\xa4type\xa5Hello\xa4rank\xcf\xff\xff\xff\xff\xff\xff\xff\xff\xa3pid\x01",
    "the loss of another": b"\x82\xa4type\xa9AgentLost\xa4node\x01",
}


@pytest.mark.parametrize("body", CORPUS.values(), ids=list(CORPUS))
def test_hostile_bodies_are_refused_without_allocating(body: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.DecodeError):
            wire.from_agent(body)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "message",
    [
        Died(1, 1000, 0.0, BoardRecord(1)),
        Died(1, -9, 0.0, BoardRecord(1, phase=max(Phase) + 1)),
        Layout(1, (Share("g", 0, 2**40),), "/save", 0, "same"),
        Layout(1, (Share("g", -1, 2),), "/save", 0, "same"),
        Layout(1, (Share("g", 0, 0),), "/save", 0, "same"),
    ],
    ids=["status", "phase", "count", "index", "no shards"],
)
def test_values_out_of_bounds_are_refused(message: Message) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.from_agent(wire.frame(message)[4:])


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
