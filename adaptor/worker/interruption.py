"""Takes the main thread out of a wait on a device, whose collective is about to be ended.

To abort a collective lets the device go on: the main thread's wait returns as if it had succeeded, and the
framework would log, or continue with, unreduced numbers. So an exception is set in the main thread first. The
main thread meets the exception on return from its current call, like the exception of a broken gloo
connection.

Invariant: the exception is set only while the main thread stands still in a call made by the framework, torch
or the script. In the adaptor's code, or in a module of Python, the main thread may hold a lock; a main thread
that waits there comes to the door.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from adaptor.worker import stacks

# Between two looks. A thread at the same instruction in both stands in a call; running code moves on.
_LOOK_S = 0.02
# The longest wait for a main thread that still queues work for the device: the controller waits for the
# answer to a freeze, too (`devices.accelerator`).
_PATIENCE_S = 0.5
_OURS = ("adaptor", "wrapt")


class CollectiveEndedError(RuntimeError):
    """The collective was ended on the device. As NCCL's own errors, it only follows from a fault."""

    def __init__(self) -> None:
        super().__init__("the collective of NCCL or HCCL was ended, as a rank that takes part in it is gone")


def interrupt(may: Callable[[], bool] = lambda: True) -> bool:
    """Set CollectiveEndedError in the main thread once it stands still in a call of others.

    From another thread; takes half a second at most.

    Args:
        may: called once the main thread stands still; False: no exception is set.

    Returns:
        Whether the exception was set.
    """
    until = time.monotonic() + _PATIENCE_S
    main = threading.main_thread().ident or 0
    place = _place(main)
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        position_before, place = place, _place(main)
        if place is None:
            return False
        if place == position_before:
            return may() and _may_raise(place[0]) and _raise_in(main)
    return False


def _place(thread: int) -> tuple[FrameType, int] | None:
    frame = stacks.frame_of(thread)
    return None if frame is None else (frame, frame.f_lasti)


def _may_raise(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__")).partition(".")[0]
    return module not in _OURS and module not in sys.stdlib_module_names


def _raise_in(thread: int) -> bool:
    error = ctypes.py_object(CollectiveEndedError)
    changed: int = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
    return changed == 1
