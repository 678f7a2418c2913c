"""Copies the output of workers to stdout and stderr (`--tee`), without blocking when nobody reads.

torch copies each log file in a thread of an executor. torch waits for these threads without a limit whenever
it ends workers, and drops signals meanwhile; the end of the interpreter also waits. So workers would not be
restarted after a reader has stopped (a hanging connection, Ctrl-S, a pager).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TextIO

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from adaptor import output, threads

# Written by one call, so that other writers cannot split a line of this length. A reader that takes less
# within `output.DRAIN_S` has stopped.
_PIECE = 1 << 16


class Tee(TailLog):
    """torch's class with threads that the interpreter does not wait for.

    A wait lasts as long as the threads write. Unwritten output is written when somebody reads again, beside
    the output of the next workers; at the end of the process it is lost.
    """

    def start(self) -> Tee:
        """Begin to copy."""
        if self._threadpool and self._dst:
            stream = _Stream(self._dst)
            self._dst = stream  # type: ignore[assignment]
            self._threadpool = _Threads(stream)  # type: ignore[assignment]
        super().start()
        return self


class _Stream:
    """The target of all log files of one kind, without Python's own buffers.

    A thread that hangs in Python's buffers would block the end of the interpreter.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = output.descriptor_of(stream)
        self._whole_lines = threading.Lock()
        self._written = 0  # pieces
        self._hangs = False

    def write(self, line: str) -> None:
        """Write a line; may block forever."""
        with self._whole_lines:
            if self._descriptor is None:
                self._stream.write(line)
                self._written += 1
                return
            data = line.encode(self._stream.encoding, "backslashreplace")
            for begin in range(0, len(data), _PIECE):
                output.write_all(self._descriptor, data[begin : begin + _PIECE])
                self._written += 1

    def wait_for(self, end: threading.Event) -> None:
        """Wait for the end of a writing thread, as long as the reader takes anything."""
        while not self._hangs:
            written_before = self._written
            if threads.wait(end, output.DRAIN_S) >= 0.0:
                return
            self._hangs = self._written == written_before


class _Threads:
    """The part of an executor that torch uses; the end of the interpreter does not wait for these
    threads.
    """

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def submit(self, copy: Callable[..., None], **job: object) -> _Copy:
        return _Copy(partial(copy, **job), self._stream)

    def shutdown(self, wait: bool) -> None:
        """Do nothing: each copy has been waited for."""


class _Copy:
    """The part of a future that torch uses."""

    def __init__(self, work: Callable[[], None], stream: _Stream) -> None:
        self._work = work
        self._stream = stream
        self._end = threading.Event()
        try:
            threading.Thread(target=self._run, name="ttp-tee", daemon=True).start()
        except RuntimeError:  # no more threads: only the log file has the output
            self._end.set()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # a closed pipe or file, a full disk
                self._work()
        finally:
            self._end.set()

    def result(self) -> None:
        self._stream.wait_for(self._end)
