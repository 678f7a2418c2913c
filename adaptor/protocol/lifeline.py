"""The lifeline: a lock that the kernel takes away from a dying process before anything else.

A killed process gives its memory back first, which takes a third of a second for each gigabyte, and only then
its parent is told of its death. But before that the kernel releases the robust locks that a thread holds
(robust_list(2)), so a thread that waits for such a lock learns of the death at once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Callable

# A pthread_mutex_t has 40 to 48 bytes.
SIZE = 64
_PTHREAD_PROCESS_SHARED = 1
_PTHREAD_MUTEX_ROBUST = 1
# How often somebody who waits asks whether that is still wanted.
_PATIENCE_S = 0.5

_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Lifeline:
    """A lock at `offset` of memory that both processes have mapped."""

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._lock = (ctypes.c_char * SIZE).from_buffer(memory, offset)

    def prepare(self) -> None:
        """Initialise the lock; called by the process that will wait, before the other one is started."""
        attributes = ctypes.create_string_buffer(SIZE)
        _call("mutexattr_init", attributes)
        _call("mutexattr_setpshared", attributes, _PTHREAD_PROCESS_SHARED)
        _call("mutexattr_setrobust", attributes, _PTHREAD_MUTEX_ROBUST)
        _call("mutex_init", self._lock, attributes)

    def hold(self) -> None:
        """Take the lock for ever; called by the thread whose end is to be noticed."""
        _call("mutex_lock", self._lock)
        # The kernel finds the lock where it lies: the interpreter must not unmap it when it ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._lock))

    def wait(self, is_wanted: Callable[[], bool]) -> bool:
        """Wait until the thread that holds the lock has ended; other threads of this process run meanwhile.

        Args:
            is_wanted: asked every half second; the wait ends when it returns False.

        Returns:
            True if that thread has ended, False if the wait is no longer wanted.
        """
        while is_wanted():
            if self._lock_within(_PATIENCE_S) == errno.EOWNERDEAD:
                _call("mutex_unlock", self._lock)
                return True
        return False

    def _lock_within(self, seconds: float) -> int:
        """Try to take the lock for `seconds`; return the error number.

        The wall clock is used only before glibc 2.30, which has no other; a clock that is set back makes that
        wait longer.
        """
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
