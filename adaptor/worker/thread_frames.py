"""The Python frames of all threads.

CPython 3.11 holds a lock of the interpreter while it makes the objects of frames, and each object may begin a
collection of garbage. A destructor that needs that lock then waits for ever, with it the whole process, as
the GIL is held (seen with 3.11.7).

Invariant: no collection begins in the call. A script that switches the collector off just between the two
lines that look and switch it on again would find it on; it does so once, at its start.
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
