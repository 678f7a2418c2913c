"""The memory that host copies take on each node, and whether it is there: checked before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adaptor.errors import UnsupportedError
from adaptor.protocol.environment import Place

_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60


def require(place: Place, needed: int, everyone: dist.ProcessGroup) -> int:
    """Refuse a job whose copies do not fit into the memory of a node; return what all ranks of a node need.

    All ranks call it at the same time, before any of them takes memory for copies.

    Args:
        place: of this process.
        needed: bytes of the copies of this rank, all files together.
        everyone: all ranks of the job.

    Raises:
        UnsupportedError: on all ranks alike: names a node, what it has, and what it would need.
    """
    told: list[Any] = [None] * everyone.size()
    dist.all_gather_object(told, (place.node, needed, available()), group=everyone)
    nodes = sorted({node for node, _, _ in told})
    own = {node: sum(size for other, size, _ in told if other == node) for node in nodes}
    # Where there are several, each keeps the copies of the one before, too.
    needs: dict[int, int] = {
        node: own[node] + (own[nodes[at - 1]] if len(nodes) > 1 else 0) for at, node in enumerate(nodes)
    }
    for node, whole in needs.items():
        there = min(free for other, _, free in told if other == node)
        if whole > there:
            raise UnsupportedError(
                f"TTP_HOST_COPY is set: the copies of node {node} take {whole} bytes of its memory, and"
                f" {there} bytes are free (limits of its control group included): leave it out, or give the"
                " node more memory"
            )
    return needs[place.node]


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
