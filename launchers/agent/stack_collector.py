"""Collects the stacks of the workers of a job that hangs, from outside the workers.

A worker writes its stacks by itself when asked to freeze (`adaptor.worker.stacks`). The agent adds native
frames, if py-spy is installed, and the stacks of workers that do not answer: by a signal, whose handler
needs no interpreter lock.

Invariants: py-spy reads a worker before the worker gets any order, because an answer may wake its main
thread; no worker is ended before its stacks are in the folder. Each of the two steps takes at most `LOOK_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from adaptor.protocol import stack_files

# py-spy takes half a second, and up to LOOK_S on a busy machine. py-spy and the worker's answer must be done
# before the rank counts as silent (`controller.freeze.HANG_ANSWER_S`).
LOOK_S = 2.0
# A process that is stopped or hangs in the kernel cannot be attached to, but its memory can be read.
_WAYS = ("--native", "--nonblocking")
_NOT_ATTACHED = "TtD"  # the states of such a process


class StackCollector:
    """The collector of the stacks of a generation of workers.

    Args:
        folder: the stack folder of the first incident; `stack_files.of_incident` names the others.
        scratch: the agent's folder, to which workers write stacks after the signal.
    """

    def __init__(self, folder: Path, scratch: Path) -> None:
        self._first = self._folder = folder
        self._scratch = scratch
        self._py_spy = find_py_spy()
        self._called = False
        self._asked_at: dict[int, tuple[int, int]] = {}  # process, and its written bytes when asked

    def begin_incident(self, incident: int) -> None:
        """Begin an incident in which the job hangs."""
        self._folder = stack_files.of_incident(self._first, incident)

    def end_incident(self) -> None:
        """End an incident after which all ranks train on."""
        self._called = False

    async def look(self, processes: Mapping[int, int]) -> None:
        """Read native stacks with py-spy, before any order.

        Args:
            processes: process numbers by rank.
        """
        self._called = True
        if self._py_spy is not None:
            await _for_each(processes, self._look_at)

    async def ask(self, processes: Mapping[int, int]) -> None:
        """Send the signal to workers that have not written their stacks."""
        if self._called:
            await _for_each(processes, self._ask)

    async def keep(self, processes: Mapping[int, int]) -> None:
        """Keep the stacks written after the signal; the workers are about to be ended."""
        if self._called:
            await _for_each(processes, self._keep)

    async def take(self, rank: int, pid: int) -> None:
        """Have one worker write its stacks, and keep them: only this worker is about to be ended."""
        if self._called:
            await _for_each({rank: pid}, self._ask)
            await _for_each({rank: pid}, self._await)
            await _for_each({rank: pid}, self._keep)

    def _look_at(self, rank: int, pid: int) -> None:
        for way in _WAYS[_state(pid)[0] in _NOT_ATTACHED :]:
            command = [str(self._py_spy), "dump", way, "--pid", str(pid)]
            completed = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_S, check=False)
            if completed.returncode == 0:
                break
        self._write(self._folder / f"rank{rank}.native.txt", completed.stdout or completed.stderr)

    def _ask(self, rank: int, pid: int) -> None:
        if not self._of(rank).exists() and _handles(pid, stack_files.SIGNAL):
            self._asked_at[rank] = pid, self._size(rank)
            os.kill(pid, stack_files.SIGNAL)

    def _await(self, rank: int, pid: int) -> None:
        """Wait until a worker has written stacks after the signal; a stopped worker writes nothing."""
        until = time.monotonic() + LOOK_S
        size_before = self._written_before(rank, pid)
        size_now = self._size(rank)
        while not self._of(rank).exists() and time.monotonic() < until:
            time.sleep(0.05)
            size = self._size(rank)
            if size > size_before and size == size_now:
                return
            size_now = size

    def _size(self, rank: int) -> int:
        return stack_files.scratch(self._scratch, rank).stat().st_size

    def _written_before(self, rank: int, pid: int) -> int:
        """Return the bytes written by a process in earlier incidents."""
        asked_pid, size = self._asked_at.get(rank, (pid, 0))
        return size if asked_pid == pid else 0

    def _keep(self, rank: int, pid: int) -> None:
        if not self._of(rank).exists():
            written = stack_files.scratch(self._scratch, rank).read_bytes()
            stack_text = written[self._written_before(rank, pid) :].decode(errors="replace")
            self._write(self._of(rank), stack_text or f"Nothing was written. State: {_state(pid)}\n")

    def _of(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.txt"

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def _for_each(processes: Mapping[int, int], act: Callable[[int, int], None]) -> None:
    """Call `act` for each rank in its own thread, so that a file system that hangs blocks no event loop."""

    def safely(rank: int, pid: int) -> None:
        # Stacks are for people: after any error the incident goes on without stacks.
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            act(rank, pid)

    threads = [
        threading.Thread(target=safely, args=process, name="ttp-stack-collector", daemon=True)
        for process in processes.items()
    ]
    until = time.monotonic() + LOOK_S
    with contextlib.suppress(RuntimeError):  # no more threads: the incident goes on without stacks
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))


def find_py_spy() -> str | None:
    """Return the path of py-spy in this environment or on PATH, None without one."""
    return shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")


def _handles(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal; without a handler the signal would end the
    process.
    """
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _status(pid), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def _state(pid: int) -> str:
    """Return the state of a process in the kernel's words: T (stopped), D (disk sleep)."""
    state = re.search(r"^State:\s*(.+)$", _status(pid), re.MULTILINE)
    return state[1] if state is not None else "gone"


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()
