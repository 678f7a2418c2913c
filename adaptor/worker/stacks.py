"""Stacks of the threads of this process, for people, and whether the main thread waits for other ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import linecache
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

from adaptor import context
from adaptor.protocol.environment import STACK_SIGNAL as SIGNAL
from adaptor.protocol.messages import CALL, Standing
from adaptor.text import encodable
from adaptor.threads import within
from adaptor.waits import Waits
from adaptor.worker import thread_frames

# The number of innermost calls to name.
_DEPTH = 4
# The number of outermost calls to compare with other ranks' calls.
_LONGEST = 200
# `adaptor.waits` is entered at most so many calls above the innermost one.
_WAIT_DEPTH = 8
# In the place of torch's own code: patches, and the store at which ranks meet (`online.meeting`).
_IN_PLACE = ("adaptor.patches.", "adaptor.patching.", "adaptor.worker.dump_store", "adaptor.protocol.wire")
# A call that returns when other ranks have done their part. Waits for a lock, a queue or a file look
# different; torch's own functions for collectives are recognised by their file. On a device, reading a number
# waits for all work started before.
_WAITS = re.compile(
    r"\b(barrier|synchronize|all_reduce|all_gather\w*|reduce_scatter\w*|broadcast|item|cpu|tolist)\("
    r"|handle\.wait\("
)
_COLLECTIVES = "/torch/distributed/"
# Work that was begun before, under any name of the framework.
_WORK = re.compile(r"\.wait\(")
# Debuggers, by their modules: pdb and its descendants, pydevd of IDEs.
_DEBUGGER = re.compile(r"(bdb|pdb|_?pydevd\w*)(\.|$)")
# Compilers, by module and function: a compiled function that runs has frames of these modules, too.
_COMPILER = re.compile(
    r"torch\._dynamo\.convert_frame _compile$"
    r"|torch\._inductor\.compile_fx _?compile_fx_inner$"
    r"|triton\.compiler\.compiler compile$"
)


def look(path: Path, limit_s: float, written: Callable[[], None]) -> Standing | None:
    """Return the main thread's innermost calls, and whether the thread waits for other ranks; None after
    `limit_s`.

    The stacks of all threads are written to `path`; `written` is called afterwards. The function reads source
    files and writes a file, and may hang in either.
    """
    standings: list[Standing] = []

    def act() -> None:
        standings.append(standing())
        with contextlib.suppress(Exception):  # stacks are for people; the save goes on without them
            _write(path)
            written()

    within(limit_s, act, "ttp-look")
    return standings[0] if standings else None


def write_when_told(path: Path) -> None:
    """Make this process write its stacks to `path` at each `SIGNAL`, whatever holds the interpreter lock."""
    with contextlib.suppress(OSError):  # stacks are for people: the job trains without them
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # something may have cleaned up there
        faulthandler.register(SIGNAL, path.open("w"), all_threads=True)  # keeps the file open


def awaited() -> Standing | None:
    """Return the position of the main thread if the thread waits for other ranks, or for any work begun
    before; None elsewhere.
    """
    position = standing()
    frames = _main_thread()
    return position if position.waits or (frames and _WORK.search(_line(frames[0]))) else None


def busy() -> bool:
    """Return whether the main thread is in a debugger or in a compiler."""
    names = [(_module(frame), frame.f_code.co_name) for frame in _main_thread()]
    return any(_DEBUGGER.match(module) or _COMPILER.match(f"{module} {name}") for module, name in names)


def _main_thread() -> list[FrameType]:
    """Return the frames of the main thread, the innermost first, without those of ours in a wait."""
    frames = list(_outwards(thread_frames.of(threading.main_thread().ident or 0)))
    frames = frames[_calls_of_waits(frames) :]
    return list(itertools.dropwhile(lambda frame: _module(frame).startswith(_IN_PLACE), frames))


def _calls_of_waits(frames: Sequence[FrameType]) -> int:
    """Return how many of the innermost calls are made by `adaptor.waits`; 0: it is not entered."""
    wait_places = [
        place for place, frame in enumerate(frames[:_WAIT_DEPTH]) if frame.f_code is Waits.wait.__code__
    ]
    return wait_places[-1] + 1 if wait_places else 0


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def standing() -> Standing:
    """Return the position of the main thread, and whether the thread waits for other ranks."""
    frames = _main_thread()
    if not frames:
        return Standing(False, "the main thread has ended")
    calls = [
        encodable(f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})")
        for frame in frames
    ]
    way = b"".join(zlib.crc32(call.encode()).to_bytes(CALL, "big") for call in calls[: -_LONGEST - 1 : -1])
    in_a_wait = context.part(Waits).current is not None
    return Standing(in_a_wait or _waits(frames[0]), " < ".join(calls[:_DEPTH]), way)


def _write(path: Path) -> None:
    """Write the stacks of all threads in the form of faulthandler, the main thread first.

    faulthandler itself writes it last, and stops after 100 threads.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for ident, frame in sorted(thread_frames.of_all().items(), key=lambda pair: pair[0] != main):
            file.write(f"Thread {ident:#018x} [{names.get(ident, 'unknown')}] (most recent call first):\n")
            for inner in _outwards(frame):
                code = inner.f_code
                file.write(f'  File "{code.co_filename}", line {inner.f_lineno} in {code.co_name}\n')
            file.write("\n")


def _waits(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return _COLLECTIVES in name or bool(_WAITS.search(_line(frame)))


def _line(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)
