"""Reads how much memory of this machine a process can still have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def available() -> int:
    """Return the bytes of memory that processes of this machine and control group can still have."""
    return min([_of_the_machine(), *_of_control_groups()])


def _of_the_machine() -> int:
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNLIMITED


def _of_control_groups() -> Iterator[int]:
    """Return what each control group around this process leaves; of version 2 and of version 1."""
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        names = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            if controllers
            else ("memory.max", "memory.current", "inactive_file")
        )
        own = root / path.lstrip("/")
        # In a container its own group may be mounted as the root, whatever its path is called.
        for folder in (own, *own.parents):
            if folder == root.parent:
                break
            left = _left(folder, *names)
            if left is not None:
                yield left


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    try:
        most = (folder / limit).read_text().strip()
        if most == "max" or int(most) >= _UNLIMITED:
            return None
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(most) - used + int(stat.get(reclaimable, 0)))
