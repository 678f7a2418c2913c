"""Writes for people: lines on stdout and stderr, logs, reports.

Output must not delay or break a decision, whether a pipe's reader has stopped, a terminal is gone, or a disk
is full or hangs. Each place therefore has a `Writer`, a bounded queue with its own thread, and the caller
goes on at once. Text that cannot be written is dropped. At the end of a process `drain` waits for the rest,
for a bounded time.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import queue
import select
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Literal, NoReturn, TextIO

from adaptor import threads
from adaptor.text import PAGE, encodable

# More than a job says in an incident; with a reader that has stopped the rest is dropped, not kept in memory.
_MOST = 10_000
# At the end of a process: a pipe or a disk that takes nothing for so long will take nothing later.
DRAIN_S = 2.0

_writers: weakref.WeakSet[Writer] = weakref.WeakSet()


class Writer:
    """Runs jobs in order, in its own thread; for a place that may fail or hang.

    Attributes:
        dropped: the number of jobs refused because the queue was full
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.forget()
        _writers.add(self)

    def forget(self) -> None:
        """Begin anew, without the queued jobs: the child of a fork has the queue, but not the thread."""
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.dropped = 0

    def start(self) -> bool:
        """Start the thread now; False where none can be had."""
        if self._thread is not None:
            return True
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=_run, args=(self._jobs,), name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads for this process, or the interpreter is at its end
                    return False
                self._thread = thread
        return True

    def submit(self, job: Callable[[], object]) -> bool:
        """Queue `job`; from any thread. Return whether the job will be run; never waits, never raises."""
        if not self.start():
            return False
        if self._jobs.qsize() >= _MOST:
            self.dropped += 1
            return False
        self._jobs.put(job)
        return True

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    @property
    def waiting(self) -> int:
        """Return the number of jobs behind the running job."""
        return self._jobs.qsize()

    def drain(self, seconds: float = DRAIN_S) -> bool:
        """Wait until all queued jobs have been run, at most `seconds`; return whether all have."""
        return self.left_after_drain(seconds) >= 0.0

    def left_after_drain(self, seconds: float) -> float:
        """Drain the writer; return the rest of `seconds`, below zero after a time-out."""
        if self._thread is None or self._thread is threading.current_thread():
            return seconds
        drained = threading.Event()
        self._jobs.put(drained.set)
        return threads.wait(drained, seconds)

    def close(self, seconds: float = DRAIN_S) -> bool:
        """Drain the writer for the last time, and let its thread end; a hanging thread stays behind."""
        _writers.discard(self)
        drained = self.drain(seconds)
        if self._thread is not None:
            self._jobs.put(_end)
            self._thread = None
        return drained


def _end() -> None:
    """Ends the thread of a writer."""


def _run(jobs: queue.SimpleQueue[Callable[[], object]]) -> None:
    while (job := jobs.get()) is not _end:
        try:
            job()
        except Exception:  # it was for people, and there is no other way to tell them
            continue


_streams = {"stdout": Writer("ttp-stdout"), "stderr": Writer("ttp-stderr")}


def start() -> None:
    """Start the threads of both streams: where an incident begins, none may be had any more."""
    for writer in _streams.values():
        writer.start()


def tell(text: str, to: Literal["stderr", "stdout"] = "stderr") -> None:
    """Write `text` and a newline for the user; from any thread. Never waits, never raises.

    Past Python's own buffers: at the end of the interpreter the buffers are locked if a thread hangs in them,
    and unwritable text makes the exit code 120.
    """
    stream = getattr(sys, to)
    if stream is None:  # closed before Python started
        return
    data = encodable(text, PAGE) + "\n"
    descriptor = descriptor_of(stream)
    if descriptor is None:
        _streams[to].submit(partial(_write_to_stream, stream, data))
        return
    # Where too much waits already, its thread is about to fill the pipe, and who writes beside it may hang.
    taken = _streams[to].submit(partial(write_all, descriptor, data.encode()))
    if not taken and not _streams[to].has_thread:
        _write_if_ready(descriptor, data.encode())


def drain(seconds: float = DRAIN_S) -> bool:
    """Wait until all queued lines, logs and reports are written, at most `seconds` in total."""
    seconds_left = [seconds]
    for writer in list(_writers):
        seconds_left.append(writer.left_after_drain(max(0.0, seconds_left[-1])))
    return min(seconds_left) >= 0.0


def leave(code: int, seconds: float = DRAIN_S) -> NoReturn:
    """End the process now, without an interpreter shutdown, once all queued output is written."""
    drain(seconds)
    os._exit(code)


def finish() -> None:
    """At the end of a program of ours: write the rest, and make the returned value the exit code.

    The interpreter would make the code 120 if a stream that cannot be written has content left.
    """
    drain()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def divert_logging() -> None:
    """Redirect the stderr logs of other libraries to `tell`, so that a log call never waits."""
    logging.lastResort = logging.StreamHandler(_TOLD)
    logging.lastResort.setLevel(logging.WARNING)
    names = [None, *logging.root.manager.loggerDict]
    for logger in map(logging.getLogger, names):
        for place, handler in enumerate(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stderr:
                logger.handlers[place] = _told_instead_of(handler)


def _told_instead_of(handler: logging.StreamHandler[_ToldStream]) -> logging.Handler:
    """Return the handler, or a similar handler if its stream cannot be set (as in dill)."""
    try:
        handler.setStream(_TOLD)
    except AttributeError:
        replacement = logging.StreamHandler(_TOLD)
        replacement.setLevel(handler.level)
        replacement.setFormatter(handler.formatter)
        return replacement
    return handler


class _ToldStream(io.TextIOBase):
    """A stream that passes each text to `tell`."""

    def write(self, text: str) -> int:
        tell(text.removesuffix("\n"))
        return len(text)


_TOLD = _ToldStream()


def descriptor_of(stream: TextIO) -> int | None:
    """Return the descriptor of the process's own stdout or stderr; None for any other stream."""
    if stream is not sys.__stdout__ and stream is not sys.__stderr__:
        return None
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def _write_to_stream(stream: TextIO, text: str) -> None:
    stream.write(text)
    stream.flush()


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data` past Python's own buffers: the call may wait for a reader for ever."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # somebody has made it non-blocking, for this process, too
            select.select((), (descriptor,), ())


def _write_if_ready(descriptor: int, data: bytes) -> None:
    """Without a thread: write the text that fits in now, in one piece."""
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(0):
            os.write(descriptor, data[: select.PIPE_BUF])
    except OSError:
        return


def _forget_all() -> None:
    for writer in list(_writers):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
atexit.register(drain)
