"""What a job must not leave behind: processes, ports, shared memory, socket files.

Every process of a job carries a mark in its environment, so that none of them can hide after its end, and the
mark stands in the names of its semaphores. What other jobs of this machine have or leave is not looked at.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests import waiting
from tests.faults.warm import MARK

# What a killed process held is given back by the kernel a moment after its parent knows of its death; on a
# machine with much other work that may be some seconds. A look reads /proc of every process.
LOOK_S = 0.1
SHARED = Path("/dev/shm")


def assert_nothing_left(mark: str, ports: list[int], scratch: Path, shared_before: set[str]) -> None:
    """Wait a moment for the last of it; then whatever is left fails the test, and is ended."""
    left: list[str] = []

    def nothing_is_left() -> bool:
        left[:] = _left(mark, ports, scratch, shared_before)
        return not left

    try:
        waiting.until(nothing_is_left, "nothing is left", pause_s=LOOK_S)
    except AssertionError:
        end(mark)
        pytest.fail("the job left behind: " + "; ".join(left))


def end(mark: str) -> None:
    """End what a job has left."""
    for pid in processes(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def shared_memory() -> set[str]:
    """Return the names of torch's shared memory on this machine."""
    return {path.name for path in SHARED.glob("torch_*")}


def _left(mark: str, ports: list[int], scratch: Path, shared_before: set[str]) -> list[str]:
    left = [f"process {pid}: {_words(pid)}" for pid in processes(mark)]
    left += [f"port {port}" for port in sorted(_listening() & set(ports))]
    left += [f"shared memory {name}" for name in sorted(_orphans(shared_memory() - shared_before))]
    left += [f"semaphore {path.name}" for path in SHARED.glob(f"sem.*{mark}*")]
    left += [f"socket {path}" for path in scratch.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    return left


def _everyone() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def processes(mark: str) -> list[int]:
    """Return the processes of this machine that have the mark of a job."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for process in _everyone():
        try:
            if wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
        except OSError:
            continue
    return found


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
    """Those that no living process has mapped: other jobs of this machine have theirs."""
    orphans = set(names)
    for process in _everyone() if orphans else ():
        try:
            maps = (process / "maps").read_text()
        except OSError:
            continue
        orphans -= {name for name in orphans if f"{SHARED}/{name}" in maps}
    return orphans
