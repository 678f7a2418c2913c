"""The board: one fixed-size record of shared memory per rank, written by the worker, read by its agent.

Invariant: the worker alone writes. There is room for two records; a write goes to the one that the sequence
number does not point to, and counts it up at the end. So the last complete record is always there, even after
a death in the middle of a write; a reader that sees the number changed reads again. The memory belongs to the
agent (an anonymous memory file, so nothing has a name that could be left behind), so it outlives the worker:
after a SIGKILL the agent still reads how far the rank had come.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Sequence

from adaptor.control.lifeline import Lifeline
from adaptor.control.messages import BoardRecord, Phase

SLOT = 4096  # a page each, so that a worker maps its own alone
# The sequence number is written through a view of 64-bit integers, at once. struct.pack_into clears its
# target first: a writer that is put off its core in between would show a number that it never had.
_SEQUENCE_BYTES = 8
_RECORD = struct.Struct("<qqqqqqqqdd256s")
_LIFELINE = 2048  # in a slot, behind the records


def _place(sequence: int) -> int:
    """Where in a slot the record with this number is."""
    return _SEQUENCE_BYTES + sequence % 2 * _RECORD.size


class BoardMemory:
    """The agent's side: the boards of the node's ranks. Creates the memory, says where it is, reads it."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._slots = {rank: slot * SLOT for slot, rank in enumerate(ranks)}
        self._fd = os.memfd_create("ttp-boards", os.MFD_CLOEXEC)
        os.fchmod(self._fd, 0o600)  # the kernel makes it open to all; only /proc is between
        os.ftruncate(self._fd, SLOT * len(ranks))
        self._memory = mmap.mmap(self._fd, SLOT * len(ranks))
        self._sequences = memoryview(self._memory).cast("Q")
        self.lifelines = {
            rank: Lifeline(self._memory, start + _LIFELINE) for rank, start in self._slots.items()
        }
        for lifeline in self.lifelines.values():
            lifeline.prepare()

    @property
    def path(self) -> str:
        """A path under which a child process of this one can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def slots(self) -> str:
        """The ranks in the order of their slots, as `Board` takes it."""
        return ",".join(map(str, self._slots))

    def read(self, rank: int) -> BoardRecord:
        """The last complete record."""
        start = self._slots[rank]
        sequence = -1
        while sequence != self._sequences[start // _SEQUENCE_BYTES]:
            sequence = self._sequences[start // _SEQUENCE_BYTES]
            fields = _RECORD.unpack_from(self._memory, start + _place(sequence))
        if sequence == 0:
            return BoardRecord(rank=rank)
        rank, pid, phase, oldest, finished, ahead, inside, progress, grad_norm, slowest, error = fields
        text = error.rstrip(b"\0").decode("utf-8", "replace")
        return BoardRecord(
            rank, pid, phase, oldest, finished, ahead, progress, grad_norm, text, inside, slowest
        )

    def close(self) -> None:
        self._sequences.release()
        self.lifelines.clear()
        self._memory.close()
        os.close(self._fd)


class Board:
    """The worker's side. `phase`, `oldest` and `finished` are also what the worker itself goes by.

    live  the oldest step whose state the live objects have; what is older is in the local copy
    """

    def __init__(self, rank: int, path: str, slots: str) -> None:
        self.rank = rank
        self.phase = Phase.STARTING
        self.oldest = -1
        self.live = -1
        self.finished = -1
        self.ahead = -1
        self.inside = -1
        self.slowest = 0.0
        self.progress = 0
        self.grad_norm = 0.0
        self._error = b""
        self._sequence = 0
        self._writing = threading.Lock()  # a dump counts its progress beside the main thread
        self._pid = os.getpid()
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            offset = slots.split(",").index(str(rank)) * SLOT
            self._memory = mmap.mmap(fd, SLOT, offset=offset)
        finally:
            os.close(fd)
        self._sequence_there = memoryview(self._memory)[:_SEQUENCE_BYTES].cast("Q")
        self.write()

    def write(self) -> None:
        """Publish the fields."""
        with self._writing:
            self._sequence += 1
            _RECORD.pack_into(
                self._memory,
                _place(self._sequence),
                self.rank,
                self._pid,
                self.phase,
                self.oldest,
                self.finished,
                self.ahead,
                self.inside,
                self.progress,
                self.grad_norm,
                self.slowest,
                self._error,
            )
            self._sequence_there[0] = self._sequence

    def hold_lifeline(self) -> None:
        """On the main thread of a worker: from now on its agent learns of its end at once."""
        Lifeline(self._memory, _LIFELINE).hold()

    def start(self, origin: int) -> None:
        """The training state is that of step `origin`."""
        self.oldest = self.live = self.finished = origin
        self.phase = Phase.RUNNING
        self.write()

    def enter(self, step: int) -> None:
        """`step` begins."""
        self.inside = step
        self.write()

    def leave(self, slowest: float) -> None:
        """The step has ended; `slowest` of the recent ones took so many seconds."""
        self.inside = -1
        self.slowest = slowest
        self.write()

    def ready(self, step: int) -> None:
        """At the door to the update of `step`."""
        self.ahead = step
        self.phase = Phase.READY
        self.write()

    def copying(self) -> None:
        """Through the door: the local copy is about to be replaced by one of the live state."""
        self.oldest = self.live
        self.write()

    def updating(self, copied: bool) -> None:
        """Through the door: the live state changes, which is gone unless it was `copied`."""
        self.live = self.ahead
        if not copied:
            self.oldest = self.live
        self.phase = Phase.UPDATING
        self.write()

    def turn_back(self) -> None:
        """Away from the door, or out of it, without the update."""
        self.phase = Phase.RUNNING
        self.write()

    def broken(self) -> None:
        """The update window was left in the middle."""
        self.phase = Phase.BROKEN
        self.write()

    def finish(self, step: int) -> None:
        """`step` is done; without an update the state of earlier steps is still here, too."""
        self.finished = step
        self.phase = Phase.RUNNING
        self.write()

    def advance(self, amount: int) -> None:
        """Count progress of a save, in bytes."""
        self.progress += amount
        self.write()

    def end(self) -> None:
        """The script has come to its end: this process goes, and that is no fault."""
        self.phase = Phase.ENDED
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
            self._error.decode("utf-8", "replace"),
            self.inside,
            self.slowest,
        )
