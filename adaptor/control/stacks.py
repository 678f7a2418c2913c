"""Where the threads of this process are, for people, and whether the main thread waits for other ranks."""

from __future__ import annotations

import faulthandler
import linecache
import re
import sys
import threading
from pathlib import Path
from types import FrameType

from adaptor.control.messages import Standing

# So many of the innermost calls are told.
_DEPTH = 4
# A call that returns when others have done their part. What waits for a lock, a queue or a file looks
# different; torch's own functions for collectives are known by their file. On a device, a number that is read
# waits for all that was started before it.
_WAITS = re.compile(
    r"\b(barrier|synchronize|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|item|cpu|tolist)\("
    r"|handle\.wait\("
)
_COLLECTIVES = "/torch/distributed/"


def standing(limit_s: float) -> Standing | None:
    """The main thread's innermost calls, and whether it waits for other ranks; None after `limit_s`.

    It reads source files, which may be where everything hangs.
    """
    found: list[Standing] = []
    thread = threading.Thread(target=lambda: found.append(_standing()), name="ttp-look", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None


def _standing() -> Standing:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return Standing(False, "the main thread has ended")
    calls: list[str] = []
    inner: FrameType | None = frame
    while inner is not None and len(calls) < _DEPTH:
        calls.append(f"{inner.f_code.co_name} ({Path(inner.f_code.co_filename).name}:{inner.f_lineno})")
        inner = inner.f_back
    return Standing(_waits(frame), " < ".join(calls))


def write(path: Path) -> None:
    """Write the stacks of all threads, as `faulthandler` tells them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)


def _waits(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return _COLLECTIVES in name or bool(_WAITS.search(linecache.getline(name, frame.f_lineno)))
