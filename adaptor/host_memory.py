"""Reads the available memory of this machine, and the processes killed for lack of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_MIB = 1 << 20
# The part of the free memory that copies take at most which nobody has asked for (TTP_HOST_COPY=auto): the
# training may need more memory later.
FOR_COPIES = 0.5


@dataclass(frozen=True)
class _Names:
    """The names of the files of a control group."""

    limit: str
    usage: str
    reclaimable: str
    peak: str
    kills: str


_VERSION_1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "memory.max_usage_in_bytes",
    "memory.oom_control",
)
# Where no control group counts, the kernel counts for the whole machine.
_PROC = Path("/proc")
_MACHINE = _Names("", "", "", "", "vmstat")
_VERSION_2 = _Names("memory.max", "memory.current", "inactive_file", "memory.peak", "memory.events")


def available() -> int:
    """Return the bytes of memory still available to processes of this machine and control group."""
    return min([_of_the_machine(), *_of_control_groups()])


def _of_the_machine() -> int:
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return _UNLIMITED


def _of_control_groups() -> Iterator[int]:
    """Return the remaining bytes of each control group around this process."""
    for folder, names in _groups_around(_OWN_GROUPS):
        bytes_left = _left(folder, names)
        if bytes_left is not None:
            yield bytes_left


def _groups_around(process: Path) -> Iterator[tuple[Path, _Names]]:
    """Return the control groups of version 2 and of version 1 around a process, the innermost first.

    Args:
        process: the process's file `cgroup` in /proc.
    """
    for line in text_of(process).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = _GROUPS / "memory" if controllers else _GROUPS
        own_folder = root / path.lstrip("/")
        # In a container its own group may be mounted as the root, whatever its path is called.
        for folder in (own_folder, *own_folder.parents):
            if folder == root.parent:
                break
            yield folder, _VERSION_1 if controllers else _VERSION_2


def _left(folder: Path, names: _Names) -> int | None:
    try:
        limit_text = (folder / names.limit).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return None
        used = int((folder / names.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, int(limit_text) - used + int(stat.get(names.reclaimable, 0)))


class OutOfMemoryKills:
    """The processes killed by the kernel for lack of memory, in the control groups of noted processes, or on
    the whole machine where no group counts.

    The kernel counts the kills of a group, and names no process. Invariant: no more deaths are explained than
    the kernel has killed since the newest process of the group was noted.
    """

    def __init__(self) -> None:
        self._groups: dict[int, tuple[Path, _Names]] = {}
        self._known: dict[Path, int] = {}

    def note(self, pid: int) -> None:
        """Note that the process `pid` has started."""
        for folder, names in (*_groups_around(Path(f"/proc/{pid}/cgroup")), (_PROC, _MACHINE)):
            count = _kills(folder, names)
            if count is not None:
                self._groups[pid], self._known[folder] = (folder, names), count
                return

    def explain(self, pid: int) -> str:
        """Return why SIGKILL has ended the process `pid`; '' for another reason than lack of memory."""
        folder, names = self._groups.pop(pid, (None, _VERSION_2))
        if folder is None or (_kills(folder, names) or 0) <= self._known[folder]:
            return ""
        self._known[folder] += 1
        limits = [
            int(text)
            for group in (folder, *folder.parents)
            if (text := text_of(group / names.limit)).isdigit()
        ]
        limit, peak = min(limits, default=_UNLIMITED), text_of(folder / names.peak)
        reasons = ["killed by the kernel: out of memory"]
        if names is _MACHINE:
            reasons.append("by the count of the whole machine")
        if limit < _UNLIMITED:
            reasons.append(f"the limit of its control group is {limit / _MIB:.0f} MiB")
        if peak.isdigit():
            reasons.append(f"the peak {int(peak) / _MIB:.0f} MiB")
        return ", ".join(reasons)


def _kills(folder: Path, names: _Names) -> int | None:
    """Return how many processes of a control group the kernel has killed for want of memory."""
    for line in text_of(folder / names.kills).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdigit():
            return int(value)
    return None


def text_of(path: Path) -> str:
    """Return the text of a small file of the kernel; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
