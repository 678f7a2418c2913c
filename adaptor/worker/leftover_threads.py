"""Ends a worker whose script has ended while threads or child processes keep the process alive.

Python waits for them without a limit, and the whole job would wait for this process. An exit function of the
script (`atexit`) may take any time: nothing is ended while an exit function runs.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.util
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from adaptor import output, text
from adaptor.worker import thread_frames

# Where Python waits for the threads, and for the child processes, of a script that has ended.
_WAITS = (threading._shutdown.__code__, multiprocessing.util._exit_function.__code__)  # type: ignore[attr-defined]


def end_after(seconds: float, rank: int) -> None:
    """End this process if threads or child processes keep the process alive for `seconds` more.

    Call at the end of the process.
    """
    if not _left():
        return

    def act() -> None:
        threading.Event().wait(seconds)
        leftovers = _left()
        if leftovers and _main_thread_waits():
            output.tell(
                f"[ttp] rank {rank}: its script ended {seconds:g} s ago (TTP_OT), and"
                f" {' and '.join(leftovers)} {'keeps' if len(leftovers) == 1 else 'keep'} the process:"
                " it is ended"
            )
            output.leave(0)

    threading.Thread(target=act, name="ttp-leftover", daemon=True).start()


def _left() -> list[str]:
    """Return the threads and child processes that Python waits for, in words."""
    alive = [thread for thread in threading.enumerate() if not thread.daemon]
    threads = [thread for thread in alive if thread is not threading.main_thread()]
    children = [child for child in multiprocessing.active_children() if not child.daemon]
    return [
        *(text.encodable(f"the thread {thread.name}{_place(thread)}") for thread in threads),
        *(text.encodable(f"the process {child.name} (pid {child.pid})") for child in children),
    ]


def _place(thread: threading.Thread) -> str:
    """Return where a thread is: the innermost call outside of Python's own code."""
    stdlib = sysconfig.get_paths()["stdlib"]
    for frame in _outwards(thread_frames.of(thread.ident or 0)):
        path = frame.f_code.co_filename
        if not path.startswith((stdlib, "<frozen ")) or "site-packages" in path:
            return f" ({Path(path).name}:{frame.f_lineno})"
    return ""


def _main_thread_waits() -> bool:
    frames = _outwards(thread_frames.of(threading.main_thread().ident or 0))
    return any(frame.f_code in _WAITS for frame in frames)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
