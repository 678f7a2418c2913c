"""The board: a worker in a child process writes, this process reads."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adaptor.protocol import board
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import BoardRecord, Phase
from tests.unit.threads import Thread

# All fields of a record hold the same number, and the next record the next number.
FAST_WRITER = """
import os, sys
from adaptor.protocol.board import Board
board = Board(1, *sys.argv[1:])
n = 0
while True:
    n += 1
    board.oldest = board.finished = board.ahead = board.progress = n
    board.grad_norm = float(n)
    board._error = b"%d" % n
    board.write()
    if n == 100:
        print("writing", flush=True)
"""

# Dies when the record is half written.
DYING_WRITER = """
import os, signal, sys
from adaptor.protocol import board

class Dying:
    size = board._RECORD.size

    def pack_into(memory, offset, *fields):
        memory[offset:offset + 100] = bytes(100)
        os.kill(os.getpid(), signal.SIGKILL)

one = board.Board(1, *sys.argv[1:])
one.start(7)
board._RECORD = Dying
one.ready(8)
"""


@contextmanager
def memory_of(*ranks: int) -> Iterator[BoardMemory]:
    memory = BoardMemory(ranks)
    try:
        yield memory
    finally:
        memory.close()


@contextmanager
def writer(script: str, memory: BoardMemory) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script, memory.path, memory.slots]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_the_agent_reads_the_record_of_the_worker() -> None:
    with memory_of(3, 1) as memory:
        worker_board = Board(1, memory.path, memory.slots)
        assert memory.read(3) == BoardRecord(rank=3)
        assert (memory.read(1).phase, memory.read(1).pid) == (Phase.STARTING, os.getpid())
        worker_board.start(4)
        worker_board.ready(5)
        worker_board.grad_norm = 0.5
        worker_board.updating(copied=False)
        read = memory.read(1)
        assert (read.phase, read.oldest, read.finished, read.ahead) == (Phase.UPDATING, 5, 4, 5)
        assert read.grad_norm == 0.5
        worker_board.finish(5)
        worker_board.finish(6)
        worker_board.advance(1000)
        worker_board.fail("é" * 200)
        read = memory.read(1)
        assert (read.phase, read.oldest, read.finished, read.progress) == (Phase.RUNNING, 5, 6, 1000)
        assert read.error.startswith("é" * 127)
        assert (read.inside, read.slowest) == (-1, 0.0)
        worker_board.enter(7)
        assert memory.read(1).inside == 7
        worker_board.leave(1.5)
        read = memory.read(1)
        assert (read.inside, read.slowest) == (-1, 1.5)
        assert (read.usual, read.turns) == (-1.0, 0)
        worker_board.turn(2.5)
        assert (memory.read(1).usual, memory.read(1).turns) == (2.5, 1)
        worker_board.turn(-1.0)
        read = memory.read(1)
        assert (read.usual, read.turns) == (-1.0, 2)
        other_board = Board(3, memory.path, memory.slots)
        other_board.advance(24)
        assert memory.read(3).progress == 24
        assert memory.read(1) == read, "one rank's board is not another's"


def provided(memory: BoardMemory) -> list[int]:
    return [step for step in range(20) if memory.read(0).provides(step)]


def test_the_steps_that_a_rank_provides() -> None:
    with memory_of(0) as memory:
        worker_board = Board(0, memory.path, memory.slots)
        assert provided(memory) == []
        worker_board.start(4)
        assert provided(memory) == [4]
        worker_board.ready(5)
        assert provided(memory) == [4, 5]
        worker_board.updating(copied=False)
        assert provided(memory) == [5]
        worker_board.finish(5)
        worker_board.finish(6)  # skipped
        assert provided(memory) == [5, 6]
        worker_board.ready(7)
        worker_board.updating(copied=False)
        worker_board.broken()
        assert provided(memory) == []


def test_the_steps_that_a_rank_with_a_local_copy_provides() -> None:
    """From the live state until the update begins, then from the copy until the next copy."""
    with memory_of(0) as memory:
        worker_board = Board(0, memory.path, memory.slots)
        worker_board.start(4)
        worker_board.ready(5)
        worker_board.copying()
        assert (provided(memory), worker_board.live) == ([4, 5], 4)
        worker_board.updating(copied=True)
        assert (provided(memory), worker_board.live) == ([4, 5], 5)
        worker_board.finish(5)
        worker_board.finish(6)  # skipped
        assert (provided(memory), worker_board.live) == ([4, 5, 6], 5)
        worker_board.ready(7)
        assert (provided(memory), worker_board.live) == ([4, 5, 6, 7], 5)
        worker_board.copying()
        assert (provided(memory), worker_board.live) == ([5, 6, 7], 5)
        worker_board.updating(copied=True)
        assert (provided(memory), worker_board.live) == ([5, 6, 7], 7)
        worker_board.broken()
        assert (provided(memory), worker_board.live) == ([5, 6], 7)
        worker_board.end()
        assert provided(memory) == []


def test_a_grad_norm_that_is_not_finite() -> None:
    with memory_of(0) as memory:
        worker_board = Board(0, memory.path, memory.slots)
        worker_board.grad_norm = math.inf
        worker_board.write()
        assert memory.read(0).grad_norm == math.inf


@pytest.fixture(params=["another core", "the same core"])
def core(request: pytest.FixtureRequest) -> Iterator[None]:
    """With both on one core the writer stands still in the middle of a write whenever the reader runs."""
    affinity = os.sched_getaffinity(0)
    if request.param == "the same core":
        os.sched_setaffinity(0, {min(affinity)})
    yield
    os.sched_setaffinity(0, affinity)


@pytest.mark.usefixtures("core")
def test_no_reading_is_torn() -> None:
    newest = 0
    with memory_of(0, 1) as memory, writer(FAST_WRITER, memory) as process:
        assert process.stdout is not None
        process.stdout.readline()
        end = time.monotonic() + 1
        while time.monotonic() < end or newest <= 1000:
            os.sched_yield()  # let the writer run on the same core
            read = memory.read(1)
            n = read.finished
            assert n >= newest
            assert (read.oldest, read.ahead, read.progress, read.grad_norm) == (n, n, n, n)
            assert read.error == str(n)
            newest = n


@pytest.mark.usefixtures("restless")
def test_two_threads_of_a_worker_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread trains while a dump counts its progress: the record being read stays untouched."""
    original = board._RECORD
    disturbed: list[int] = []

    class Watched:
        size = original.size
        unpack_from = original.unpack_from

        @staticmethod
        def pack_into(memory: mmap.mmap, offset: int, *fields: object) -> None:
            original.pack_into(memory, offset, *fields)
            disturbed.extend([offset] if offset == board._place(memory[0]) else [])

    monkeypatch.setattr(board, "_RECORD", Watched)
    with memory_of(0) as memory:
        worker_board = Board(0, memory.path, memory.slots)
        worker_board.start(0)

        def dump() -> None:
            for _ in range(2000):
                worker_board.advance(1)

        with Thread(dump):
            for step in range(1, 1000):
                worker_board.ready(step)
                worker_board.updating(copied=False)
                worker_board.finish(step)
        assert disturbed == []
        assert memory.read(0).finished == 999
        assert memory.read(0).progress == 2000


def test_a_killed_writer_leaves_something_to_read() -> None:
    with memory_of(1) as memory, writer(FAST_WRITER, memory) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
        read = memory.read(1)
        assert read == memory.read(1)
        n = read.finished
        assert n >= 100
        assert (read.rank, read.oldest, read.ahead, read.progress, read.grad_norm) == (1, n, n, n, n)


def test_a_death_in_the_middle_of_a_write_leaves_the_record_before() -> None:
    with memory_of(1) as memory, writer(DYING_WRITER, memory) as process:
        assert process.wait(60) == -signal.SIGKILL
        read = memory.read(1)
        assert (read.rank, read.pid, read.phase, read.finished) == (1, process.pid, Phase.RUNNING, 7)


def test_the_memory_has_no_name() -> None:
    with memory_of(0) as memory:
        path = Path(memory.path)
        assert str(path.readlink()).startswith("/memfd:")
    assert not path.exists()


def test_a_rank_without_a_slot_is_refused() -> None:
    with memory_of(0, 1) as memory, pytest.raises(ValueError, match="2"):
        Board(2, memory.path, memory.slots)


def test_the_memory_is_the_users_alone() -> None:
    memory = BoardMemory([0])
    try:
        assert stat.S_IMODE(Path(memory.path).stat().st_mode) == 0o600
    finally:
        memory.close()


def test_memory_that_a_thread_still_waits_in_can_be_let_go_of() -> None:
    """A waiter reports a broken lifeline before it releases the lock."""
    memory = BoardMemory([0])
    lifeline = memory.lifelines[0]
    memory.close()
    assert not lifeline.wait(lambda: False)
    lifeline.hold()  # the page exists until the last holder releases it


# Keeps three texts in turn, and dies in the middle of the third.
DYING_KEEPER = """
import os, signal, sys
from adaptor.protocol import board

one = board.Board(1, *sys.argv[1:])
one.keep(b"first")
one.keep(b"second" * 50)

class Dying:
    size = board._LENGTH.size

    def pack_into(memory, offset, *fields):
        memory[offset:offset + 100] = bytes(100)
        os.kill(os.getpid(), signal.SIGKILL)

board._LENGTH = Dying
one.keep(b"third")
"""


def test_a_kept_text_is_read_by_the_next_process() -> None:
    with memory_of(0, 1) as memory:
        assert Board(1, memory.path, memory.slots).kept == b""
        with writer(DYING_KEEPER, memory) as process:
            assert process.wait() == -signal.SIGKILL
        memory.reset(1)
        assert memory.read(1) == BoardRecord(rank=1)
        worker_board = Board(1, memory.path, memory.slots)
        assert worker_board.kept == b"second" * 50
        assert Board(0, memory.path, memory.slots).kept == b""


def test_a_text_too_long_to_keep_removes_the_previous_text() -> None:
    with memory_of(0, 1) as memory:
        worker_board = Board(0, memory.path, memory.slots)
        worker_board.keep(b"before")
        worker_board.keep(b"x" * board.SLOT)
        worker_board.hold_lifeline()
        assert Board(0, memory.path, memory.slots).kept == b""
        worker_board.keep(b"x" * 900)
        assert Board(0, memory.path, memory.slots).kept == b"x" * 900
        assert Board(1, memory.path, memory.slots).kept == b""


HOLDER = """
import sys, threading
from adaptor.protocol.board import Board
threading.Thread(target=threading.Event().wait, daemon=True).start()  # another thread, a daemon
Board(1, *sys.argv[1:]).hold_lifeline()
print("held", flush=True)
sys.stdin.read()
"""
LIMIT_S = 30.0


def _holder(memory: BoardMemory) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLDER, memory.path, memory.slots]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def _wait(memory: BoardMemory) -> threading.Event:
    event = threading.Event()

    def wait() -> None:
        if memory.lifelines[1].wait(lambda: True):
            event.set()

    threading.Thread(target=wait, daemon=True).start()
    return event


def test_a_killed_process_lets_go_of_its_lifeline() -> None:
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        lifeline_broke = _wait(memory)
        assert not lifeline_broke.wait(0.2)
        os.kill(process.pid, signal.SIGKILL)
        assert lifeline_broke.wait(LIMIT_S)
    memory.close()


def test_a_process_that_ends_lets_go_of_its_lifeline() -> None:
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        lifeline_broke = _wait(memory)
        process.communicate("")
        assert lifeline_broke.wait(LIMIT_S)
    memory.close()


def test_a_late_waiter_sees_the_broken_lifeline() -> None:
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        process.kill()
        process.wait()
        assert _wait(memory).wait(LIMIT_S)
    memory.close()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "pthread_mutex_clocklock"), reason="glibc before 2.30")
def test_a_wall_clock_that_is_put_back_makes_no_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would wait until the earlier reading of the clock: an hour here."""
    real_time = time.time
    monkeypatch.setattr(time, "time", lambda: real_time() + 3600.0)
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        answers = iter([True, False])
        over = threading.Event()

        def wait() -> None:
            assert not memory.lifelines[1].wait(lambda: next(answers))
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        assert over.wait(LIMIT_S)
        process.kill()
    memory.close()
