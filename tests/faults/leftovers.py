"""Finds processes, ports, shared memory and sockets that a job has left behind.

Every process of a job carries a mark in its environment, so a leftover process can be found. The mark is also
in the names of the job's semaphores. Resources of other jobs on this machine are ignored.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests import waiting
from tests.faults.warm import MARK

# The kernel frees the resources of a killed process a moment after its parent is told of the death; on a busy
# machine this takes seconds. Each look reads /proc of every process.
LOOK_S = 0.1
SHARED = Path("/dev/shm")


def assert_nothing_left(mark: str, ports: list[int], scratch: Path, shared_before: set[str]) -> None:
    """Wait a moment; then end whatever the job has left behind, and fail the test."""
    leftover: list[str] = []

    def nothing_is_left() -> bool:
        leftover[:] = _left(mark, ports, scratch, shared_before)
        return not leftover

    try:
        waiting.until(nothing_is_left, "nothing is left", pause_s=LOOK_S)
    except AssertionError:
        end(mark)
        pytest.fail("the job left behind: " + "; ".join(leftover))


def end(mark: str) -> None:
    """Kill the processes of a job."""
    for pid in processes(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def shared_memory() -> set[str]:
    """Return the names of torch's shared memory on this machine."""
    return {path.name for path in SHARED.glob("torch_*")}


def _left(mark: str, ports: list[int], scratch: Path, shared_before: set[str]) -> list[str]:
    leftover = [f"process {pid}: {_words(pid)}" for pid in processes(mark)]
    leftover += [f"port {port}" for port in sorted(_listening() & set(ports))]
    leftover += [f"shared memory {name}" for name in sorted(_orphans(shared_memory() - shared_before))]
    leftover += [f"semaphore {path.name}" for path in SHARED.glob(f"sem.*{mark}*")]
    leftover += [f"socket {path}" for path in _sockets(scratch)]
    return leftover


def _sockets(scratch: Path) -> Iterator[Path]:
    """Yield the sockets in a folder, whose processes may still remove files and folders of it."""
    for folder, _, names in os.walk(scratch):  # it skips a folder that is removed meanwhile; rglob raises
        for path in (Path(folder, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    yield path


def _everyone() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def processes(mark: str) -> list[int]:
    """Return the processes of the machine with a job's mark."""
    variable = f"{MARK}={mark}".encode()
    pids = []
    for process in _everyone():
        try:
            if variable in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
        except OSError:
            continue
    return pids


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return ""


def _listening() -> set[int]:
    ports = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else []:
            _, local, _, state = line.split()[:4]
            if state == "0A":
                ports.add(int(local.rpartition(":")[2], 16))
    return ports


def _orphans(names: Iterable[str]) -> set[str]:
    """Return the shared memory mapped by no living process; other jobs of the machine have theirs mapped."""
    orphans = set(names)
    for process in _everyone() if orphans else ():
        try:
            maps = (process / "maps").read_text()
        except OSError:
            continue
        orphans -= {name for name in orphans if f"{SHARED}/{name}" in maps}
    return orphans
