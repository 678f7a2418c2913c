"""Reads /proc: ends all processes of the workers' sessions, and tells how a process stands."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

# In /proc/PID/stat, behind the name, which is in parentheses and may hold anything.
_STATE, _PARENT, _SESSION, _STARTED = 0, 1, 3, 19
# Each look finds what was forked during the one before; a process that is being killed forks nothing more.
_LOOKS = 20

# In /proc/PID/stat: the process is on its way out (PF_EXITING of the kernel), and where the flags stand.
_EXITING = 0x4
_FLAGS_FIELD = 6  # behind the name, which is in parentheses and may hold anything


def started(pid: int) -> int:
    """Return when a process began, in ticks of the kernel; -1 where there is none, or that cannot be read."""
    fields = _stat(pid)
    return int(fields[_STARTED]) if fields else -1


def end_group(leader: int) -> None:
    """End every process of the group that a worker leads (torch elastic starts each in a session)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_sessions(leaders: Mapping[int, int]) -> None:
    """End every process of the sessions of workers that have ended, whatever its process group.

    The number of a session leader is not reused while a process is in its session. A process that has the
    number and began later leads a session of its own, which is left alone.

    In a container of which this process is the first, the kernel hands what workers leave behind to it. Of
    those nobody else takes the status, without which they stay and count as processes: it is taken here.

    Args:
        leaders: the start of each worker (ticks of the kernel), by its process number.
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
    """Yield number and start of each process of the sessions that lives; take the status of orphans."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208  (names are all that is wanted, of thousands)
    except OSError:  # no descriptors: the group has been ended at least
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
    """Take the status of a process that has ended, where it was handed to this one.

    Whoever has started a process takes its status. What this process starts is in its own session, or leads
    one; so another one was handed to it, also one of an earlier generation of workers that took long to end.
    """
    if parent == os.getpid() and session not in (pid, os.getsid(0)):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _end(pid: int, at: int) -> None:
    """End a process by a descriptor, because its number may be another process's by now."""
    with contextlib.suppress(OSError):
        descriptor = os.pidfd_open(pid)
        try:
            if started(pid) == at:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _stat(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def is_exiting(pid: int) -> bool:
    """Return True if the process has ended or is exiting; exec releases the lifeline, too, and is neither."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:  # it is gone; or nothing can be opened, and then its descriptor tells of its end
        return not Path(f"/proc/{pid}").exists()
    return bool(int(fields[_FLAGS_FIELD]) & _EXITING)


def is_traced(pid: int) -> bool:
    """Return True if a debugger holds the process."""
    try:
        status = Path(f"/proc/{pid}/status").read_bytes()
    except OSError:
        return False
    return bool(re.search(rb"^TracerPid:\t[1-9]", status, re.MULTILINE))
