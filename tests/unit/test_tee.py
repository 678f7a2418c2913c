"""Copies of the workers' output on the terminal (`--tee`)."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import pytest

from adaptor import output, threads
from adaptor.launchers.agent.elastic_outputs import Tee
from tests.unit.launching import ONE, Launcher, launcher, zygote
from tests.unit.threads import LONG_S

__all__ = ["launcher", "zygote"]

COPIED = "[default0]:one\n[default0]:two\n[default0]:three\n"


class Reader(io.StringIO):
    """A stream that accepts a line on request; `offered` counts the lines offered."""

    def __init__(self) -> None:
        super().__init__()
        self.offered = threading.Semaphore(0)
        self.takes = threading.Semaphore(0)
        self.has_all = threading.Event()

    def write(self, text: str) -> int:
        self.offered.release()
        assert self.takes.acquire(timeout=LONG_S)
        count = super().write(text)
        if self.getvalue() == COPIED:
            self.has_all.set()
        return count


@pytest.fixture
def log(tmp_path: Path) -> str:
    file = tmp_path / "stdout.log"
    file.write_text("one\ntwo\nthree\n")
    return str(file)


def test_the_output_of_a_worker_is_copied(launcher: Launcher) -> None:
    script = launcher.script("import os\nos.write(1, b'to stdout\\n')\nos.write(2, b'to stderr\\n')\n")
    patient = f"from adaptor import output\noutput.DRAIN_S = {LONG_S}"
    result = launcher.run(*ONE, "--tee", "3", script, prelude=patient, code=0)
    lines = result.log.splitlines()
    assert [lines.count(f"[default0]:to {stream}") for stream in ("stdout", "stderr")] == [1, 1], result.log


def test_lines_of_several_ranks_are_whole_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are complete: torch would copy a part of a line being written."""
    monkeypatch.setattr(output, "DRAIN_S", LONG_S)
    expected = {rank: [str(rank) * (1 + 830 * n) for n in range(100)] for rank in (0, 1)}
    for rank, lines in expected.items():
        (tmp_path / f"{rank}.log").write_text("".join(f"{line}\n" for line in lines))
    copied = tmp_path / "copied"
    with copied.open("w") as stream:
        monkeypatch.setattr(sys, "__stdout__", stream)
        tee = Tee("default", {rank: str(tmp_path / f"{rank}.log") for rank in expected}, stream)
        tee.start().stop()
    lines = copied.read_text().splitlines()
    for rank in expected:
        prefix = f"[default{rank}]:"
        assert [line.removeprefix(prefix) for line in lines if line.startswith(prefix)] == expected[rank]


def test_a_blocked_terminal_is_not_awaited(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal gets the lines when it reads again."""
    monkeypatch.setattr(output, "DRAIN_S", 0.01)
    reader = Reader()
    tee = Tee("default", {0: log}, reader, interval_sec=0.001).start()
    assert reader.offered.acquire(timeout=LONG_S)
    tee.stop()
    assert reader.getvalue() == ""
    reader.takes.release(3)
    assert reader.has_all.wait(LONG_S)


def test_a_slow_terminal_is_awaited(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait times out; the wait repeats as long as the terminal reads a line each time."""
    reader = Reader()
    tee = Tee("default", {0: log}, reader, interval_sec=0.001).start()
    assert reader.offered.acquire(timeout=LONG_S)
    answers = [1, 1, 0]  # lines accepted after each accepted line

    def wait(end: threading.Event, limit_s: float) -> float:
        reader.takes.release()
        if answers.pop(0):
            assert reader.offered.acquire(timeout=LONG_S)
            return -1.0
        assert end.wait(LONG_S)
        return limit_s

    monkeypatch.setattr(threads, "wait", wait)
    tee.stop()
    assert (reader.getvalue(), answers) == (COPIED, [])
