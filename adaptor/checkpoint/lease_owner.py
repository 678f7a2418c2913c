"""Names the process for which a save folder is leased.

Invariant: no two processes have the same name, whatever the machine and the time. A number of a process that
is used again, a restart of the machine and a container with numbers of its own are told apart.
"""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True):
    """The identity of a process, unique over time and over machines.

    Attributes:
        ticks: when it started, as the kernel counts
        boot: of the machine, another one after each start of it
        namespace: of process numbers: a container has its own
        started: when it started, for people
    """

    host: str
    pid: int
    ticks: int
    boot: str
    namespace: str
    started: str

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Describe a process of this machine. Raises OSError where there is none."""
        ticks = _ticks(pid)
        booted = re.search(r"^btime (\d+)$", _read(Path("/proc/stat")), re.MULTILINE)
        since = float(booted.group(1)) if booted else 0.0
        began = datetime.fromtimestamp(since + ticks / os.sysconf("SC_CLK_TCK"), timezone.utc)
        return cls(
            platform.node(), pid, ticks, _boot(), _namespace(), began.strftime("%Y-%m-%d %H:%M:%S UTC")
        )

    @property
    def words(self) -> str:
        """Name it for a person."""
        return f"the job of process {self.pid} on {self.host}, started {self.started}"

    def lives(self) -> bool | None:
        """Return whether the process is there; None where this machine does not know."""
        if not self.boot or (self.boot, self.namespace) != (_boot(), _namespace()):
            return None
        try:
            return _ticks(self.pid) == self.ticks
        except OSError:
            return False


def _ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _boot() -> str:
    return _read(Path("/proc/sys/kernel/random/boot_id")).strip()


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _read(path: Path) -> str:
    """Return what the kernel says; nothing in a sandbox that does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
