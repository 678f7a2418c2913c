"""Control groups that limit memory, the rate of writes, or the number of processes."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import waiting

# For the faults `oom` and `slow-disk`: the folder of the group that a process joins.
MEMORY = "TTP_TEST_MEMORY_GROUP"
SLOW = "TTP_TEST_SLOW_GROUP"
_ROOT = Path("/sys/fs/cgroup")
_UNIFIED = (_ROOT / "cgroup.controllers").exists()
_LIMIT = 64 << 20
# Bytes to allocate, far more than the limit: a group that does not stop the process fails the test.
_HOARD = 16 * _LIMIT


@contextmanager
def too_little_memory(limit: int = _LIMIT) -> Iterator[Path]:
    """Make a group whose processes are killed when they use more than `limit` bytes.

    Raises:
        OSError: the user may not make such a group on the machine.
    """
    limits = (
        {"memory.max": limit, "memory.swap.max": 0}
        if _UNIFIED
        else {"memory.limit_in_bytes": limit, "memory.swappiness": 0}
    )
    with _group("memory", limits) as group:
        yield group


@contextmanager
def slow_writes(device: Path, rate: int) -> Iterator[Path]:
    """Make a group whose processes write at most `rate` bytes a second to a block device.

    Raises:
        OSError: the user may not make such a group on the machine.
    """
    number = device.stat().st_rdev
    numbers = f"{os.major(number)}:{os.minor(number)}"
    limits = (
        {"io.max": f"{numbers} wbps={rate}"}
        if _UNIFIED
        else {"blkio.throttle.write_bps_device": f"{numbers} {rate}"}
    )
    with _group("io" if _UNIFIED else "blkio", limits) as group:
        yield group


@contextmanager
def no_more_threads(process: int) -> Iterator[Path]:
    """Make a group of `process` and its future children in which no further process or thread can start.

    At the end the processes return to their previous group.

    Raises:
        OSError: the user may not make such a group on the machine.
    """
    with _group("pids", {}) as group:
        hierarchy = "0" if _UNIFIED else "pids"
        lines = Path(f"/proc/{process}/cgroup").read_text().splitlines()
        (home,) = [
            path
            for number, names, path in (line.split(":", 2) for line in lines)
            if hierarchy in (number, *names.split(","))
        ]
        join(group, process)
        try:
            (group / "pids.max").write_text((group / "pids.current").read_text())
            yield group
        finally:
            root = _ROOT if _UNIFIED else _ROOT / "pids"
            for member in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    join(root / home.lstrip("/"), int(member))


def killed_in(group: Path) -> int:
    """Return how many processes of a group the kernel has killed for want of memory."""
    events = group / ("memory.events" if _UNIFIED else "memory.oom_control")
    (count,) = [line.split()[1] for line in events.read_text().splitlines() if line.startswith("oom_kill ")]
    return int(count)


def join(group: Path, process: int) -> None:
    (group / "cgroup.procs").write_text(str(process))


def eat(group: Path) -> None:
    """Join `group` with this process, and use up the group's memory."""
    join(group, os.getpid())
    hoard = [b"\1" * (1 << 20) for _ in range(_HOARD >> 20)]
    raise MemoryError(f"{len(hoard)} MiB fitted into {group}")


@contextmanager
def _group(controller: str, limits: dict[str, object]) -> Iterator[Path]:
    path = (_ROOT if _UNIFIED else _ROOT / controller) / f"ttp-{uuid.uuid4().hex[:8]}"
    path.mkdir()
    try:
        for name, limit in limits.items():
            (path / name).write_text(str(limit))
        yield path
    finally:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a group; the kernel may hold a process that has just ended for a moment."""

    def removed() -> bool:
        try:
            path.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False
        return True

    waiting.until(removed, f"{path} is empty")
