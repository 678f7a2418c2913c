"""The Python frames of all threads.

CPython 3.11 holds a lock of the interpreter while creating frame objects, and each new object may begin a
garbage collection. A destructor in need of the lock then waits for ever, and the whole process with it, as
the GIL is held (seen with 3.11.7).

Invariant: no collection begins in the call. A script that switches the collector off between the two lines
that read and restore the collector's state would find the collector on; scripts do so once, at the start.
"""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

# Of two calls at the same time the first would switch the collector on in the middle of the second. A signal
# handler may be in the middle of its own thread's.
_one_at_a_time = threading.RLock()


def of_all() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identifier."""
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None where it has ended."""
    return of_all().get(thread)
