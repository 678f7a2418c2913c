"""Processes of workers: reads /proc, ends sessions, and watches lifelines for deaths.

A lifeline is a robust mutex on a rank's board (`adaptor.protocol.lifeline`), which the kernel releases at a
death before the memory is freed; one thread waits for each lifeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from adaptor.protocol.board import BoardMemory

# Fields of /proc/PID/stat after the name, which is in parentheses and may contain any character.
_STATE, _PARENT, _SESSION, _USER_TIME, _SYSTEM_TIME, _STARTED = 0, 1, 3, 11, 12, 19
# Each look finds processes forked during the previous look; a process that is being killed forks no more.
_LOOKS = 20

# The kernel's flag PF_EXITING in /proc/PID/stat, and the field of the flags after the name.
_EXITING = 0x4
_FLAGS_FIELD = 6


def started(pid: int) -> int:
    """Return when a process began, in ticks of the kernel; -1 for no process or an unreadable file."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else -1


def main_thread_ticks(pid: int) -> int:
    """Return the CPU time of the main thread of a process, in ticks of the kernel; 0 if unreadable."""
    fields = _stat(pid, f"task/{pid}/stat")
    return int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME]) if fields else 0


def parent(pid: int) -> int:
    """Return the parent of a process; -1 for no process or an unreadable file."""
    fields = _stat(pid)
    return int(fields[_PARENT]) if fields else -1


def end_group(leader: int) -> None:
    """End every process of a worker's process group (torch elastic starts each worker in a session)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_sessions(leaders: Mapping[int, int]) -> None:
    """End every process in the sessions of dead workers, whatever its process group.

    The kernel reuses the number of a session leader only after the last process of the session. A later
    process with the number leads a session of its own and is left alone.

    If the agent is the first process of a container, the kernel makes the agent the parent of orphans.
    Orphans count as processes until their status is taken: the function takes it.

    Args:
        leaders: the start of each worker (ticks of the kernel), by process number.
    """
    known_processes: set[tuple[int, int]] = set()
    for _ in range(_LOOKS):
        reused = {leader for leader, at in leaders.items() if started(leader) not in (-1, at)}
        new = {
            member
            for member in _members(leaders.keys() - reused)
            if member not in known_processes and member[0] not in leaders
        }
        if not new:
            return
        for pid, at in new:
            _end(pid, at)
        known_processes |= new


def _members(sessions: set[int]) -> Iterator[tuple[int, int]]:
    """Yield number and start of each living process of the sessions; take the status of orphans."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208  (thousands of names, and no paths)
    except OSError:  # no descriptors; at least the group has been ended
        return
    for name in names:
        fields = _stat(int(name)) if name.isdigit() else []
        if not fields or fields[_STATE] == b"X":
            continue
        if fields[_STATE] == b"Z":
            _take_status(int(name), int(fields[_PARENT]), int(fields[_SESSION]))
        elif int(fields[_SESSION]) in sessions:
            yield int(name), int(fields[_STARTED])


def _take_status(pid: int, parent: int, session: int) -> None:
    """Take the status of an orphan that has ended.

    The parent of a process takes its status. Processes started by the agent are in the agent's session or
    lead a session; so any other child is an orphan, possibly from an earlier generation of workers.
    """
    if parent == os.getpid() and session not in (pid, os.getsid(0)):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _end(pid: int, at: int) -> None:
    """End a process by a descriptor: its number may already belong to another process."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if started(pid) == at:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _stat(pid: int, file: str = "stat") -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/{file}").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def is_exiting(pid: int) -> bool:
    """Return True if the process has ended or is exiting; after exec, which also releases the lifeline,
    False.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # the process is gone, or no file can be opened: then its pidfd reports the end
        return not Path(f"/proc/{pid}").exists()
    return bool(int(fields[_FLAGS_FIELD]) & _EXITING)


def is_traced(pid: int) -> bool:
    """Return True if a debugger holds the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    return bool(re.search(rb"^TracerPid:\t[1-9]", status, re.MULTILINE))


class WorkerLifelines:
    """The lifelines of the workers of one agent, on its control thread.

    Args:
        on_dying: is called on the thread with rank and process number of a dying worker, and the Unix time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_dying: Callable[[int, int, float], None]) -> None:
        self._loop = loop
        self._on_dying = on_dying
        self._boards: BoardMemory | None = None
        self._ended: dict[int, asyncio.Future[None]] = {}  # by rank; done after the waiting thread
        self._replaced: Counter[int] = Counter()  # the replaced processes of each rank
        self.held: set[int] = set()  # ranks whose process still holds its lifeline (it has not exec-ed)

    def begin(self, boards: BoardMemory) -> None:
        """Begin a generation, with its boards."""
        self._boards = boards

    def watch(self, rank: int, pid: int) -> None:
        """Wait for the lifeline of the process `pid`, which is the worker of `rank`."""
        boards = self._boards
        assert boards is not None
        lifeline, process = boards.lifelines[rank], self._replaced[rank]

        ended_future: asyncio.Future[None] = self._loop.create_future()

        def wait() -> None:
            try:
                if not lifeline.wait(lambda: self._boards is boards and self._replaced[rank] == process):
                    return
                if is_exiting(pid):
                    self._loop.call_soon_threadsafe(self._on_dying, rank, pid, time.time())
                else:
                    self.held.discard(rank)
            finally:
                self._loop.call_soon_threadsafe(ended_future.set_result, None)

        thread = threading.Thread(target=wait, name=f"ttp-lifeline-{rank}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads: the pidfd reports the death a moment later
            return
        self.held.add(rank)
        self._ended[rank] = ended_future

    async def let_go(self, rank: int) -> None:
        """Stop waiting for the lifeline of `rank`, which gets another process."""
        self._replaced[rank] += 1  # ends the waiting thread
        if rank in self._ended:
            await asyncio.shield(self._ended[rank])
        self.held.discard(rank)

    async def end(self) -> None:
        """End the generation and all waiting threads."""
        self._boards = None
        self.held = set()
        await asyncio.gather(*self._ended.values())
        self._ended = {}
        self._replaced.clear()
