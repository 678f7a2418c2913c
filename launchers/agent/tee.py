"""Copies to stdout and stderr what workers write (`--tee`), and holds nobody up where nobody reads it.

torch copies each log file in a thread of an executor. It waits for these threads without a limit whenever it
ends workers, and drops a signal that comes meanwhile; the end of the interpreter waits for them, too. So no
worker would be started again where a reader has stopped (a connection that hangs, Ctrl-S, a pager).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TextIO

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from adaptor import output, threads

# Written by one call, so a line of that length is whole, whoever writes beside it. A reader that takes less
# within `output.DRAIN_S` has stopped.
_PIECE = 1 << 16


class Tee(TailLog):
    """torch's, with threads that need not be waited for.

    They are waited for as long as something is written. What they have not written then they write when
    somebody reads again, beside those of the next workers; at the end of the process it is lost.
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
    """The stream to which all log files of one kind are copied, past Python's own buffers.

    A thread that hangs in these keeps the end of the interpreter from writing them.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._descriptor = output.descriptor_of(stream)
        self._whole_lines = threading.Lock()
        self._written = 0  # pieces
        self._hangs = False

    def write(self, line: str) -> None:
        """Write a line; it may wait for ever."""
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
        """Wait for the end of one that writes to it, as long as it takes anything."""
        while not self._hangs:
            written_before = self._written
            if threads.wait(end, output.DRAIN_S) >= 0.0:
                return
            self._hangs = self._written == written_before


class _Threads:
    """Has what torch asks of its executor; the end of the interpreter does not wait for these threads."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def submit(self, copy: Callable[..., None], **job: object) -> _Copy:
        return _Copy(partial(copy, **job), self._stream)

    def shutdown(self, wait: bool) -> None:
        """Has nothing to do: each copy has been waited for."""


class _Copy:
    """Has what torch asks of a future."""

    def __init__(self, work: Callable[[], None], stream: _Stream) -> None:
        self._work = work
        self._stream = stream
        self._end = threading.Event()
        try:
            threading.Thread(target=self._run, name="ttp-tee", daemon=True).start()
        except RuntimeError:  # no more threads for this process: the log file has it all
            self._end.set()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # a pipe or a file that is closed, a full disk
                self._work()
        finally:
            self._end.set()

    def result(self) -> None:
        self._stream.wait_for(self._end)
