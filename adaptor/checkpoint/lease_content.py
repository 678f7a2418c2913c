"""The content of the lease of a save folder (`lease`): the identity of the process that owns the lease."""

from __future__ import annotations

import os
import platform
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

import msgspec

LARGEST = 4096  # bytes; a longer file is no lease

_Owner = TypeVar("_Owner", bound="Owner")


class Owner(msgspec.Struct, frozen=True):
    """The identity of a process, unique over time and over machines.

    Invariant: no two processes have the same identity. A process number that is used again, a restart of the
    machine and a container with numbers of its own are told apart.

    Attributes:
        boot: of the machine, another value after each start of the machine
        namespace: of process numbers: a container has its own
    """

    host: str
    pid: int
    ticks: int
    boot: str
    namespace: str
    started: str

    @classmethod
    def of(cls, pid: int) -> Owner:
        """Describe a process of this machine. Raises OSError without such a process."""
        ticks = _ticks(pid)
        booted = re.search(r"^btime (\d+)$", _read(Path("/proc/stat")), re.MULTILINE)
        since = float(booted.group(1)) if booted else 0.0
        began = datetime.fromtimestamp(since + ticks / os.sysconf("SC_CLK_TCK"), timezone.utc)
        return cls(
            platform.node(), pid, ticks, _boot(), _namespace(), began.strftime("%Y-%m-%d %H:%M:%S UTC")
        )

    @property
    def words(self) -> str:
        """Return the name for a person."""
        return f"the job of process {self.pid} on {self.host}, started {self.started}"

    def lives(self) -> bool | None:
        """Return True if the process runs; None if this machine cannot tell."""
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
    """Return the content of a file of the kernel; "" in a sandbox without the file."""
    try:
        return path.read_text()
    except OSError:
        return ""


class LeaseContent(Owner, frozen=True):
    """The content of the lease file: the owner, and the leased folder, by which a copy is recognised.

    Attributes:
        generation: of the workers whose rank 0 has written the lease; "" if the agent has
        excluded: the agents of the generation without which the job goes on
        store: HOST:PORT of the rendezvous store, if the job has lost the store of its flags; otherwise ""
        ended: the owner has ended; the file is for the other side of a cut network, which may go on
    """

    device: int = 0
    inode: int = 0
    leaving: bool = False
    generation: str = ""
    excluded: tuple[str, ...] = ()
    store: str = ""
    ended: bool = False

    @classmethod
    def of_owner(
        cls, owner: Owner, generation: str, excluded: tuple[str, ...] = (), store: str = ""
    ) -> LeaseContent:
        """Return the lease of `owner`; `_write` adds the folder."""
        fields = msgspec.structs.asdict(owner)
        return cls(**fields, generation=generation, excluded=excluded, store=store)


def decode(text: bytes, kind: type[_Owner]) -> _Owner | None:
    """Return the owner in the `text` of a lease, of this `kind`; None if the text is no lease."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
