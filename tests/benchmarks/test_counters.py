"""What `benchmarks/step_counts.py` counts with: each counter counts what was done."""

from __future__ import annotations

import mmap
import socket
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import _counters

    return _counters


@pytest.fixture
def counts(counters: ModuleType) -> ModuleType:
    import _part_counts

    return _part_counts


@pytest.fixture
def parts(counters: ModuleType) -> ModuleType:
    import _parts

    return _parts


def test_bytes_that_are_sent(counters: ModuleType) -> None:
    sent = counters.SentBytes()
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as one:
        accepted, _ = server.accept()
        with accepted:
            sent.find()
            before = sent.read()
            one.sendall(bytes(100_000))  # more than nobody reads at once: some of it waits in the kernel
            accepted.sendall(bytes(23))
            assert sent.read() - before == 100_023


def test_events_of_this_thread(counters: ModuleType) -> None:
    try:
        counter = counters.Counter(counters.SOFTWARE, counters.PAGE_FAULTS)
    except OSError as error:
        pytest.skip(str(error))
    before = counter.read()
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as memory:
        for page in range(64):
            memory[page * mmap.PAGESIZE] = 1
    assert counter.read() - before >= 1  # the kernel may make several pages at once
    if not counters.why_no_instructions():
        instructions = counters.Counter(counters.HARDWARE, counters.INSTRUCTIONS)
        before = instructions.read()
        assert sum(range(1000)) == 499_500
        assert instructions.read() - before > 1000


def test_an_event_belongs_to_the_innermost_part(counts: ModuleType) -> None:
    found = counts.by_part(
        counts.Event(*event)
        for event in [
            ("[memory]", 5, 0, 1),
            ("part: barrier", 10, 30, 0),
            ("c10d::barrier", 12, 1, 0),
            ("part: board", 20, 10, 0),
            ("[memory]", 25, 0, 100),
            ("[memory]", 26, 0, -100),
            ("[memory]", 30, 0, 10),
            ("c10d::send", 39, 1, 0),
            ("c10d::recv_", 39, 1, 0),
            ("[memory]", 40, 0, 1000),
        ]
    )
    there = {name: {part: n for part, n in amounts.items() if n} for name, amounts in found.items()}
    assert there == {
        "collectives": {"barrier": 1, "all": 1},
        "messages": {"barrier": 1, "all": 1},
        "allocations": {"board": 1, "barrier": 1, "all": 4},
        "allocated": {"board": 100, "barrier": 10, "all": 1111},
    }


def test_a_part_is_without_those_in_it(parts: ModuleType) -> None:
    now = 0

    def passes(amount: int) -> None:
        nonlocal now
        now += amount

    class Meters(parts.Times):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.parts = {"wall": lambda: now}

    shares = parts.Shares(Meters())

    def outer() -> None:
        passes(1)
        shares.measured("barrier", lambda: passes(10))
        passes(100)
        shares.measured("barrier", lambda: passes(1000))

    shares.measured("door", outer)
    assert {part: taken for part, taken in shares.taken.items() if any(taken)} == {
        "door": [101],
        "barrier": [1010],
    }
    assert (shares.calls["door"], shares.calls["barrier"]) == (1, 2)
