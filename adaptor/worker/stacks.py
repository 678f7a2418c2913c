"""The threads of this process: their stacks, for people; whether the main thread waits for other ranks or has
left a step; and the end of a process that threads keep alive.

CPython 3.11 holds a lock of the interpreter while creating frame objects, and each new object may begin a
garbage collection. A destructor in need of the lock then waits for ever, and the whole process with it, as
the GIL is held (seen with 3.11.7). Invariant: no collection begins while frames are read (`all_frames`). A
script that switches the collector off between the two lines that read and restore the collector's state would
find the collector on; scripts do so once, at the start.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import json
import linecache
import multiprocessing
import multiprocessing.util
import re
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from adaptor import context, output
from adaptor.protocol.collectives import Collectives, encode, newest
from adaptor.protocol.environment import STACK_SIGNAL as SIGNAL
from adaptor.protocol.messages import CALL, Standing
from adaptor.text import encodable
from adaptor.threads import within
from adaptor.waits import Waits

# The number of innermost calls to name.
_DEPTH = 4
# The number of outermost calls to compare with other ranks' calls.
_LONGEST = 200
# `adaptor.waits` is entered at most so many calls above the innermost one.
_WAIT_DEPTH = 8
# In the place of torch's own code: patches, and the store at which ranks meet (`online.transfer`).
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
# Where Python waits for the threads, and for the child processes, of a script that has ended.
_WAITS_AT_THE_END = (threading._shutdown.__code__, multiprocessing.util._exit_function.__code__)  # type: ignore[attr-defined]
# torch's flight recorders keep the newest collectives, and return them as JSON without waiting for a
# collective: for backends of the CPU, and for NCCL; present according to the build of torch.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

# Of two calls at the same time the first would switch the collector on in the middle of the second. A signal
# handler may be in the middle of its own thread's.
_one_at_a_time = threading.RLock()


def all_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identifier."""
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread; None where it has ended."""
    return all_frames().get(thread)


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
    """Return the position of the main thread if it waits for other ranks, or any earlier work; else None."""
    position = standing()
    frames = _main_thread()
    return position if position.waits or (frames and _WORK.search(_line(frames[0]))) else None


def busy() -> bool:
    """Return whether the main thread is in a debugger or in a compiler."""
    names = [(_module(frame), frame.f_code.co_name) for frame in _main_thread()]
    return any(_DEBUGGER.match(module) or _COMPILER.match(f"{module} {name}") for module, name in names)


def _main_thread() -> list[FrameType]:
    """Return the frames of the main thread, the innermost first, without those of ours in a wait."""
    frames = list(_outwards(frame_of(threading.main_thread().ident or 0)))
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
        for ident, frame in sorted(all_frames().items(), key=lambda pair: pair[0] != main):
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


class _Call(NamedTuple):
    """A call on the way to where a thread stands; the frame by its number, for it must not be kept alive."""

    frame: int
    code: CodeType
    line: int


class _StepLines(NamedTuple):
    """The lines of a step in the function `code`, which is the call number `depth` from the outermost."""

    depth: int
    code: CodeType
    first: int
    last: int


class LoopPosition:
    """The place of a training loop in its script: tells whether a begun step has been left by `break`.

    The end of a step without an update, begun by `begin_step`, is not reported. The calls that led to
    `begin_step` and to the updates of earlier steps show the function of the loop and the lines of a step. A
    main thread outside of these lines has left the step. Told by the thread that trains; any other may ask.
    """

    def __init__(self) -> None:
        self._begun: list[_Call] = []
        self._body: _StepLines | None = None

    def begin(self) -> None:
        """A step begins."""
        self._begun = _calls(sys._getframe(1))

    def update(self) -> None:
        """Its optimizer makes the update."""
        shared = [
            (begun_call, present_call)
            for begun_call, present_call in zip(self._begun, _calls(sys._getframe(1)), strict=False)
            if (begun_call.frame, begun_call.code) == (present_call.frame, present_call.code)
        ]
        if not shared:
            return
        begun_call, present_call = shared[-1]
        body = _StepLines(len(shared) - 1, begun_call.code, begun_call.line, present_call.line)
        known_body = self._body
        if known_body is not None and known_body[:2] == body[:2]:
            body = body._replace(
                first=min(known_body.first, body.first), last=max(known_body.last, body.last)
            )
        self._body = body

    def was_left(self, thread: int) -> bool:
        """Return whether `thread` has left the step that it has begun; False if unknown."""
        body, begun_calls = self._body, self._begun
        if body is None or len(begun_calls) <= body.depth or begun_calls[body.depth].code is not body.code:
            return False
        calls = _calls(frame_of(thread))
        if len(calls) <= body.depth or calls[body.depth].frame != begun_calls[body.depth].frame:
            return True  # the function has returned
        return body.first <= body.last and not body.first <= calls[body.depth].line <= body.last


def _calls(frame: FrameType | None) -> list[_Call]:
    """Return the calls that led to `frame`, the outermost first."""
    return [_Call(id(frame), frame.f_code, frame.f_lineno) for frame in _outwards(frame)][::-1]


def end_leftovers_after(seconds: float, rank: int) -> None:
    """End this process if threads or child processes keep the process alive for `seconds` more.

    Python waits for them without a limit, and the whole job would wait for this process. An exit function of
    the script (`atexit`) may take any time: nothing is ended while an exit function runs. Call at the end of
    the process.
    """
    if not _leftovers():
        return

    def act() -> None:
        threading.Event().wait(seconds)
        leftovers = _leftovers()
        if leftovers and _main_thread_waits():
            output.tell(
                f"[ttp] rank {rank}: its script ended {seconds:g} s ago (TTP_OT), and"
                f" {' and '.join(leftovers)} {'keeps' if len(leftovers) == 1 else 'keep'} the process:"
                " it is ended"
            )
            output.leave(0)

    threading.Thread(target=act, name="ttp-leftover", daemon=True).start()


def _leftovers() -> list[str]:
    """Return the threads and child processes that Python waits for, in words."""
    alive = [thread for thread in threading.enumerate() if not thread.daemon]
    threads = [thread for thread in alive if thread is not threading.main_thread()]
    children = [child for child in multiprocessing.active_children() if not child.daemon]
    return [
        *(encodable(f"the thread {thread.name}{_place_of_thread(thread)}") for thread in threads),
        *(encodable(f"the process {child.name} (pid {child.pid})") for child in children),
    ]


def _place_of_thread(thread: threading.Thread) -> str:
    """Return where a thread is: the innermost call outside of Python's own code."""
    stdlib = sysconfig.get_paths()["stdlib"]
    for frame in _outwards(frame_of(thread.ident or 0)):
        path = frame.f_code.co_filename
        if not path.startswith((stdlib, "<frozen ")) or "site-packages" in path:
            return f" ({Path(path).name}:{frame.f_lineno})"
    return ""


def _main_thread_waits() -> bool:
    frames = _outwards(frame_of(threading.main_thread().ident or 0))
    return any(frame.f_code in _WAITS_AT_THE_END for frame in frames)


def write_collectives(path: Path) -> str:
    """Write the collectives begun by this rank to `path`, and return the newest of each group for the
    controller.

    Returns:
        '' where nothing is recorded: by this torch, by these backends, or because the recorder is switched
        off.
    """
    dumps = list(_records())
    newest_collectives: Collectives = {}
    for dump in dumps:
        newest_collectives.update(newest(dump))
    if not newest_collectives:
        return ""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps(dumps))
    return encode(str(path), newest_collectives)


def _records() -> Iterator[object]:
    from torch._C import _distributed_c10d  # a torch may be built without it

    for name in _RECORDERS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield json.loads(dump())
