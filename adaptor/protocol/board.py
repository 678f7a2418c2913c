"""The board: one fixed-size record of shared memory per rank, written by the worker, read by its agent.

Invariant: the worker alone writes. A slot has room for two records; a write goes to the record that the
sequence number does not point to, and increments the number at the end. So the last complete record always
exists, even after a death in the middle of a write; a reader that sees the number changed reads again. The
memory belongs to the agent (an anonymous memory file, so no name can be left behind), and outlives the
worker: after a SIGKILL the agent still reads the rank's progress. Behind the records are the seconds of the
main thread in each use (`USES`), each a number of its own, and room for data that a worker keeps for its
successor, written like a record.

The lifeline is a lock in the same memory that the kernel takes away from a dying process before anything
else. A killed process first gives its memory back, which takes a third of a second for each gigabyte, and
only then its parent is told of the death. But before that the kernel releases the robust locks of a thread
(robust_list(2)), so a thread that waits for such a lock learns of the death at once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence

from adaptor import descriptors
from adaptor.protocol.messages import BoardRecord, ComputeTime, Phase, ScriptStage

# A pthread_mutex_t has 40 to 48 bytes.
LIFELINE_SIZE = 64
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
# The pause between two calls of `is_wanted` in a wait.
_PATIENCE_S = 0.5

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Lifeline:
    """A lock at `offset` of memory that both processes have mapped."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._lock = (ctypes.c_char * LIFELINE_SIZE).from_buffer(memory, offset)

    def prepare(self) -> None:
        """Initialise the lock; called by the waiting process, before the holding process is started."""
        attributes = ctypes.create_string_buffer(LIFELINE_SIZE)
        _call("mutexattr_init", attributes)
        _call("mutexattr_setpshared", attributes, _PTHREAD_PROCESS_SHARED)
        _call("mutexattr_setrobust", attributes, _PTHREAD_MUTEX_ROBUST)
        _call("mutex_init", self._lock, attributes)

    def hold(self) -> None:
        """Take the lock for ever; called by the thread whose end is to be noticed."""
        _call("mutex_lock", self._lock)
        # The kernel uses the lock in its memory: the interpreter must not unmap the memory at its end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._lock))

    def wait(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait until the thread that holds the lock has ended; return False once `is_wanted` does."""
        while is_wanted():
            if self._lock_within(_PATIENCE_S) == errno.EOWNERDEAD:
                _call("mutex_unlock", self._lock)
                return True
        return False

    def _lock_within(self, seconds: float) -> int:
        """Try to take the lock for `seconds`; return the error number."""
        if hasattr(_libc, "pthread_mutex_clocklock"):
            clock = ctypes.c_int(time.CLOCK_MONOTONIC)
            return _call("mutex_clocklock", self._lock, clock, _deadline(time.monotonic() + seconds))
        return _call("mutex_timedlock", self._lock, _deadline(time.time() + seconds))


def _deadline(at: float) -> object:
    return ctypes.byref(_Timespec(int(at), int(at % 1 * 1e9)))


def _call(name: str, *arguments: object) -> int:
    code = int(getattr(_libc, f"pthread_{name}")(*arguments))
    if code not in (0, errno.EOWNERDEAD, errno.ETIMEDOUT):
        raise OSError(code, f"pthread_{name}: {os.strerror(code)}")
    return code


SLOT = 4096  # a page each, so that a worker maps only its own
# The sequence number is written at once, through a view of 64-bit integers. struct.pack_into clears its
# target first: if interrupted in between, it would show a number that never existed.
_SEQUENCE_BYTES = 8
_RECORD = struct.Struct("<qqqqqqqqdddqqd256s")
# The uses of the main thread's time: finished steps, and phases between steps; "other" are phases of other
# names.
USES = ("steps", "data", "evaluation", "save", "load", "other")
_USE = {use: number for number, use in enumerate(USES)}
_SPENT = 1024  # in a slot, behind the records
_SPENT_END = _SPENT + 8 * (len(USES) + 2)  # the last two: a `ComputeTime`
_LIFELINE = 2048  # behind that
# behind the lifeline: a sequence number, and room for two texts with their lengths
_KEPT = _LIFELINE + LIFELINE_SIZE
_KEPT_SIZE = (SLOT - _KEPT - _SEQUENCE_BYTES) // 2 // 8 * 8
_LENGTH = struct.Struct("<q")


def _place(sequence: int) -> int:
    """Return the place in a slot of the record with this number."""
    return _SEQUENCE_BYTES + sequence % 2 * _RECORD.size


def _kept_place(sequence: int) -> int:
    """Return the place in a slot of the text with this number."""
    return _KEPT + _SEQUENCE_BYTES + sequence % 2 * _KEPT_SIZE


class BoardMemory:
    """The agent's side: creates the memory for the boards of the node's ranks, and reads the boards."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._slots = {rank: slot * SLOT for slot, rank in enumerate(ranks)}
        self._fd = descriptors.in_memory("ttp-boards")
        os.fchmod(self._fd, 0o600)  # open to all users by default; only /proc protects it
        os.ftruncate(self._fd, SLOT * len(ranks))
        self._memory = mmap.mmap(self._fd, SLOT * len(ranks))
        self._sequences = memoryview(self._memory).cast("Q")
        self._seconds = memoryview(self._memory).cast("d")
        self.lifelines = {
            rank: Lifeline(self._memory, start + _LIFELINE) for rank, start in self._slots.items()
        }
        for lifeline in self.lifelines.values():
            lifeline.prepare()

    @property
    def path(self) -> str:
        """Return a path under which a child process can open the memory."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @property
    def slots(self) -> str:
        """Return the ranks in the order of their slots, as an argument of `Board`."""
        return ",".join(map(str, self._slots))

    def read(self, rank: int) -> BoardRecord:
        """Return the last complete record of `rank`."""
        start = self._slots[rank]
        sequence = -1
        while sequence != self._sequences[start // _SEQUENCE_BYTES]:
            sequence = self._sequences[start // _SEQUENCE_BYTES]
            fields = _RECORD.unpack_from(self._memory, start + _place(sequence))
        if sequence == 0:
            return BoardRecord(rank=rank)
        rank, pid, phase, oldest, finished, ahead, inside, progress, *remaining_fields = fields
        grad_norm, slowest, usual, turns, stage, kernel_timeout, error = remaining_fields
        text = error.rstrip(b"\0").decode("utf-8", "replace")
        return BoardRecord(
            rank=rank,
            pid=pid,
            phase=phase,
            oldest=oldest,
            finished=finished,
            ahead=ahead,
            progress=progress,
            grad_norm=grad_norm,
            error=text,
            inside=inside,
            slowest=slowest,
            usual=usual,
            turns=turns,
            stage=stage,
            kernel_timeout=kernel_timeout,
        )

    def newest_step(self) -> int:
        """Return the newest step that a rank has finished; -1: none."""
        return max((self.read(rank).finished for rank in self._slots), default=-1)

    def spent(self) -> list[float]:
        """Return the seconds of the lowest rank in each of `USES`, in their order."""
        start = (self._slots[min(self._slots)] + _SPENT) // 8
        return [float(seconds) for seconds in self._seconds[start : start + len(USES)]]

    def compute_times(self) -> dict[int, ComputeTime]:
        """Return the compute time of each rank; ranks without a measure are absent."""
        places = {rank: (start + _SPENT) // 8 + len(USES) for rank, start in self._slots.items()}
        return {
            rank: ComputeTime(seconds, self._seconds[place + 1])
            for rank, place in places.items()
            if (seconds := self._seconds[place])
        }

    def reset(self, rank: int) -> None:
        """Clear the slot of `rank` for the successor of a dead process; kept data stays."""
        start = self._slots[rank]
        self._sequences[start // _SEQUENCE_BYTES] = 0  # first: from now on no record exists
        self._memory[start + _SEQUENCE_BYTES : start + _KEPT] = bytes(_KEPT - _SEQUENCE_BYTES)
        self.lifelines[rank].prepare()

    def close(self) -> None:
        """Let go of the memory.

        The memory is unmapped when the last thread that waits for a lifeline has let go of it, too: such a
        thread may still be on its way out, and memory with pointers into it cannot be closed.
        """
        self._sequences.release()
        self._seconds.release()
        self.lifelines.clear()
        del self._memory
        os.close(self._fd)


class Board:
    """The worker's side: writes the record. The session also reads `phase`, `oldest` and `finished`.

    Attributes:
        live: the oldest step whose state the live objects have; older states are in the local copy
        finished: the newest step whose update this rank has made, or that has ended without an update
        kept: the data that the predecessor has kept (`keep`); empty: none
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
        self.usual = -1.0
        self.turns = 0
        self.progress = 0
        self.grad_norm = 0.0
        self.stage = ScriptStage.TRAINING
        self.kernel_timeout = 0.0
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
        memory_view = memoryview(self._memory)
        self._sequence_there = memory_view[:_SEQUENCE_BYTES].cast("Q")
        self._kept_there = memory_view[_KEPT : _KEPT + _SEQUENCE_BYTES].cast("Q")
        self._spent_there = memory_view[_SPENT:_SPENT_END].cast("d")
        self._kept_sequence = self._kept_there[0]
        self.kept = self.read_kept()
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
                self.usual,
                self.turns,
                self.stage,
                self.kernel_timeout,
                self._error,
            )
            self._sequence_there[0] = self._sequence

    def spend(self, use: str, seconds: float) -> None:
        """Add to the seconds of one of `USES`, or of "other"; main thread only."""
        self._spent_there[_USE.get(use, _USE["other"])] += seconds

    def compute(self, seconds: ComputeTime) -> None:
        """Publish the usual seconds of forward and backward passes; main thread only."""
        self._spent_there[len(USES) + 1] = seconds.of_token  # first: a reader may come between
        self._spent_there[len(USES)] = seconds.of_step

    def keep(self, data: bytes) -> None:
        """Keep `data` for the successor of this process; data too large clears the slot; main thread only."""
        if len(data) > _KEPT_SIZE - _LENGTH.size:
            data = b""
        sequence = self._kept_sequence = self._kept_sequence + 1
        place = _kept_place(sequence)
        _LENGTH.pack_into(self._memory, place, len(data))
        place += _LENGTH.size
        self._memory[place : place + len(data)] = data
        self._kept_there[0] = sequence

    def read_kept(self) -> bytes:
        """Return the data that this process, or its predecessor, has kept last; main thread only."""
        place = _kept_place(self._kept_sequence)
        (length,) = _LENGTH.unpack_from(self._memory, place)
        return bytes(self._memory[place + _LENGTH.size : place + _LENGTH.size + length])

    def hold_lifeline(self) -> None:
        """Hold the lifeline: the agent learns of the end of this process at once; main thread only."""
        Lifeline(self._memory, _LIFELINE).hold()

    def start(self, origin: int) -> None:
        """Record the training state of step `origin`."""
        self.oldest = self.live = self.finished = self.ahead = origin
        self.phase = Phase.RUNNING
        self.stage = ScriptStage.TRAINING
        self.write()

    def go_back(self, step: int) -> None:
        """Record that the state after `step` is given up; `start` records the live state of `step`."""
        self.finished = self.ahead = step
        self.write()

    def enter(self, step: int) -> None:
        """Record the begin of `step`."""
        self.inside = step
        self.stage = ScriptStage.TRAINING  # also if the script has reported the end of its loop before
        self.write()

    def leave(self, slowest: float) -> None:
        """Record the end of the step; `slowest`: seconds of the slowest recent step."""
        self.inside = -1
        self.slowest = slowest
        self.write()

    def turn(self, usual: float) -> None:
        """Record that a phase of the loop (evaluation, save) begins or ends.

        `usual`: the longest seconds of earlier phases of this kind; 0: none; -1: in no phase now.
        """
        self.usual = usual
        self.turns += 1
        self.write()

    def ready(self, step: int) -> None:
        """Record that the rank is READY: at the door to the update of `step`."""
        self.ahead = step
        self.phase = Phase.READY
        self.write()

    def copying(self) -> None:
        """Record, past the door, that the local copy is about to be replaced by a copy of the live state."""
        self.oldest = self.live
        self.write()

    def updating(self, copied: bool) -> None:
        """Record, past the door, that the update changes the live state; lost unless `copied`."""
        self.live = self.ahead
        if not copied:
            self.oldest = self.live
        self.phase = Phase.UPDATING
        self.write()

    def turn_back(self) -> None:
        """Record that the rank has left the door without the update."""
        self.phase = Phase.RUNNING
        self.write()

    def broken(self) -> None:
        """Record that an exception has left the update window in the middle."""
        self.phase = Phase.BROKEN
        self.write()

    def changed(self, step: int) -> None:
        """Mark the live state as half-updated to `step`, without the door, so that it cannot be saved."""
        self.oldest = self.live = step
        self.phase = Phase.BROKEN
        self.write()

    def finish(self, step: int) -> None:
        """Record that `step` is done; after a step without an update earlier states stay available."""
        self.finished = step
        self.phase = Phase.RUNNING
        self.write()

    def advance(self, amount: int) -> None:
        """Count progress of a save, in bytes."""
        self.progress += amount
        self.write()

    def reach(self, stage: ScriptStage) -> None:
        """Record that the script has come to `stage`."""
        self.stage = stage
        self.write()

    def end(self) -> None:
        """Record the end of the script: the following end of the process is no fault."""
        self.phase = Phase.ENDED
        self.stage = ScriptStage.FINISHED
        self.write()

    def fail(self, error: str) -> None:
        """Record that this rank has failed by `error`, cut to 255 bytes."""
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
            self.usual,
            self.turns,
            self.stage,
            self.kernel_timeout,
        )
