"""The board: one fixed-size record of shared memory per rank, written by the worker, read by its agent.

Invariant: the worker alone writes; the sequence number is odd while a write is under way, and a reader that
sees an odd or a changed number reads again. The memory belongs to the agent (an anonymous memory file, so
nothing has a name that could be left behind), hence it outlives the worker: after a SIGKILL the agent still
reads how far the rank had come.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence

from adaptor.control.messages import BoardRecord, Phase

SLOT = 4096  # a page each, so that a worker maps its own alone
_SEQUENCE = struct.Struct("<Q")
_RECORD = struct.Struct("<qqqqqqqdd256s")
# A write takes about a microsecond: a reader that meets an odd number this often meets a writer that died.
_READS = 100


class BoardMemory:
    """The agent's side: the boards of the node's ranks. Creates the memory, says where it is, reads it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._slots = {rank: slot * SLOT for slot, rank in enumerate(ranks)}
        self._fd = os.memfd_create("ttp-boards", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, SLOT * len(ranks))
        self._memory = mmap.mmap(self._fd, SLOT * len(ranks))

    @property
    def path(self) -> str:
        """A path under which a child process of this one can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def slots(self) -> str:
        """The ranks in the order of their slots, as `Board` takes it."""
        return ",".join(map(str, self._slots))

    def read(self, rank: int) -> BoardRecord:
        """The last complete record; after a death in the middle of a write, what is there."""
        start = self._slots[rank]
        for _ in range(_READS):
            (before,) = _SEQUENCE.unpack_from(self._memory, start)
            fields = _RECORD.unpack_from(self._memory, start + _SEQUENCE.size)
            (after,) = _SEQUENCE.unpack_from(self._memory, start)
            if before == after and before % 2 == 0:
                break
        if before == 0:
            return BoardRecord(rank=rank)
        rank, pid, phase, oldest, finished, ahead, progress, grad_norm, written_at, error = fields
        text = error.rstrip(b"\0").decode("utf-8", "replace")
        return BoardRecord(rank, pid, phase, oldest, finished, ahead, progress, grad_norm, written_at, text)

    def progress(self) -> int:
        """The sum of the progress counters."""
        return sum(self.read(rank).progress for rank in self._slots)

    def close(self) -> None:
        self._memory.close()
        os.close(self._fd)


class Board:
    """The worker's side. `phase`, `oldest` and `finished` are also what the worker itself goes by."""

    def __init__(self, rank: int, path: str, slots: str) -> None:
        self.rank = rank
        self.phase = Phase.STARTING
        self.oldest = -1
        self.finished = -1
        self.ahead = -1
        self.progress = 0
        self.grad_norm = 0.0
        self._error = b""
        self._sequence = 0
        self._pid = os.getpid()
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            offset = slots.split(",").index(str(rank)) * SLOT
            self._memory = mmap.mmap(fd, SLOT, offset=offset)
        finally:
            os.close(fd)
        self.write()

    def write(self) -> None:
        """Publish the fields."""
        memory = self._memory
        self._sequence += 2
        _SEQUENCE.pack_into(memory, 0, self._sequence - 1)
        _RECORD.pack_into(
            memory,
            8,
            self.rank,
            self._pid,
            self.phase,
            self.oldest,
            self.finished,
            self.ahead,
            self.progress,
            self.grad_norm,
            time.time(),
            self._error,
        )
        _SEQUENCE.pack_into(memory, 0, self._sequence)

    def start(self, origin: int) -> None:
        """The training state is that of step `origin`."""
        self.oldest = self.finished = origin
        self.phase = Phase.RUNNING
        self.write()

    def ready(self, step: int) -> None:
        """At the door to the update of `step`."""
        self.ahead = step
        self.phase = Phase.READY
        self.write()

    def updating(self) -> None:
        """Through the door."""
        self.phase = Phase.UPDATING
        self.write()

    def turn_back(self) -> None:
        """Away from the door, without the update."""
        self.phase = Phase.RUNNING
        self.write()

    def broken(self) -> None:
        """The update window was left in the middle."""
        self.phase = Phase.BROKEN
        self.write()

    def finish(self, step: int, updated: bool) -> None:
        """`step` is done; without an update the state of earlier steps is still here, too."""
        self.finished = step
        if updated:
            self.oldest = step
        self.phase = Phase.RUNNING
        self.write()

    def advance(self, amount: int) -> None:
        """Count progress of a save, in bytes."""
        self.progress += amount
        self.write()

    def fail(self, error: str) -> None:
        self._error = error.encode("utf-8", "replace")[:255]
        self.write()

    def record(self) -> BoardRecord:
        return BoardRecord(
            self.rank,
            self._pid,
            self.phase,
            self.oldest,
            self.finished,
            self.ahead,
            self.progress,
            self.grad_norm,
            time.time(),
            self._error.decode("utf-8", "replace"),
        )
