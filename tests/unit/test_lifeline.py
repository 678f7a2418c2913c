from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from adaptor.protocol.board import BoardMemory

HOLDER = """
import sys, threading
from adaptor.protocol.board import Board
threading.Thread(target=threading.Event().wait, daemon=True).start()  # another thread, which outlives none
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
    ended = threading.Event()

    def wait() -> None:
        if memory.lifelines[1].wait(lambda: True):
            ended.set()

    threading.Thread(target=wait, daemon=True).start()
    return ended


def test_a_killed_process_lets_go_of_its_lifeline() -> None:
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        ended = _wait(memory)
        assert not ended.wait(0.2)
        os.kill(process.pid, signal.SIGKILL)
        assert ended.wait(LIMIT_S)
    memory.close()


def test_a_process_that_ends_lets_go_of_its_lifeline() -> None:
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        ended = _wait(memory)
        process.communicate("")
        assert ended.wait(LIMIT_S)
    memory.close()


def test_whoever_waits_late_is_told_all_the_same() -> None:
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        process.kill()
        process.wait()
        assert _wait(memory).wait(LIMIT_S)
    memory.close()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "pthread_mutex_clocklock"), reason="glibc before 2.30")
def test_a_wall_clock_that_is_put_back_makes_no_wait_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of it, the kernel would wait for: an hour here."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600.0)
    memory = BoardMemory([0, 1])
    with _holder(memory) as process:
        asked = iter([True, False])
        over = threading.Event()

        def wait() -> None:
            assert not memory.lifelines[1].wait(lambda: next(asked))
            over.set()

        threading.Thread(target=wait, daemon=True).start()
        assert over.wait(LIMIT_S)
        process.kill()
    memory.close()
