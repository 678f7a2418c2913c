"""Outputs of torch elastic that must not block: events for other tools, failed processes, `--tee`.

docs/exit_codes.md lists the events.

torch copies each log file of `--tee` in a thread of an executor. torch waits for these threads without a
limit whenever it ends workers, and drops signals meanwhile; the end of the interpreter also waits. So workers
would not be restarted after a reader has stopped (a hanging connection, Ctrl-S, a pager).
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TextIO

from torch.distributed.elastic import events
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from adaptor import output, text, threads
from adaptor.errors import ConfigError
from adaptor.protocol.messages import Recovered, Verdict

INCIDENT = "ttp.incident"
VERDICT = "ttp.verdict"
# torch's name for the error file of a worker that has left none.
_NO_FILE = "<N/A>"
# The bytes that `Tee` writes by one call, so that other writers cannot split a line of this length. A reader
# that takes less within `output.DRAIN_S` has stopped.
_PIECE = 1 << 16


class ElasticEvents:
    """Records two events for each verdict of an agent.

    The event handler, which may be third-party code, is called in a separate thread, also for torch's own
    events. So a handler that raises or hangs delays only further events.

    Args:
        destination: the name of a handler of torch elastic (`--event-log-handler`).
        run_id: of the job, as in torch elastic's events.

    Raises:
        ConfigError: torch elastic has no handler of the name.
    """

    def __init__(self, destination: str, run_id: str) -> None:
        self._destination = destination
        self._run_id = run_id
        try:
            logger = events._get_or_create_logger(destination)
        except KeyError:
            raise ConfigError(
                f"--event-log-handler is {destination!r}: torch elastic has no handler of that name;"
                " leave it out, or take console or null"
            ) from None
        for handler in list(logger.handlers):
            if not isinstance(handler, _InItsThread | logging.NullHandler):
                logger.removeHandler(handler)
                logger.addHandler(_InItsThread(handler))

    def conclude(self, verdict: Verdict, node: int, noticed: float) -> None:
        """Record the notice and the end of an incident.

        Args:
            verdict: the end of the incident.
            node: the agent's group rank in torch elastic.
            noticed: when the agent learnt of the fault, in Unix seconds.
        """
        event_data: dict[str, str | int | float | bool | None] = {
            "run_id": self._run_id,
            "group_rank": node,
            "incident": verdict.incident,
            "rank": verdict.cause_rank if verdict.cause_rank >= 0 else None,
            "step": verdict.newest if verdict.newest >= 0 else None,
            "cause": verdict.line,
        }
        concluded = {
            **event_data,
            "step": verdict.step if verdict.outcome == "saved" else None,
            "outcome": verdict.outcome,
            "exit_code": verdict.exit_code,
        }
        self._record((INCIDENT, noticed, event_data), (VERDICT, time.time(), concluded))

    def go_on(self, recovered: Recovered, node: int) -> None:
        """Record an incident after which training went on online: the outcome is `recovered`.

        Args:
            recovered: the end of the incident.
            node: the agent's group rank in torch elastic.
        """
        time_now = time.time()
        event_data: dict[str, str | int | float | bool | None] = {
            "run_id": self._run_id,
            "group_rank": node,
            "incident": recovered.incident,
            "rank": next(iter(recovered.fault.ranks), None),
            "step": recovered.step,
            "cause": recovered.line,
        }
        concluded = {**event_data, "outcome": "recovered", "exit_code": None}
        self._record((INCIDENT, time_now - recovered.seconds, event_data), (VERDICT, time_now, concluded))

    def _record(self, *all_of_one: tuple[str, float, dict[str, str | int | float | bool | None]]) -> None:
        for name, at, metadata in all_of_one:
            try:
                events.record(Event(name, EventSource.AGENT, int(at * 1000), metadata), self._destination)
            except Exception as error:  # events are for people
                output.tell(f"[ttp] the event {name} is not recorded: {text.describe(error)}")


class _InItsThread(logging.Handler):
    """Passes events to `handler` in a separate thread, which alone calls the handler.

    The handler is called without its lock: at the end of a process `logging` takes the locks of all
    handlers, and would wait for a handler that hangs.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._writer = output.Writer("ttp-events")
        self._writer.start()  # in an incident the process may get no thread

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.submit(partial(_emit, self._handler, record))


def _emit(handler: logging.Handler, record: logging.LogRecord) -> None:
    try:
        if handler.filter(record):
            handler.emit(record)
    except BaseException as error:  # third-party code may raise anything
        output.tell(f"[ttp] an event of torch elastic is not recorded: {type(error).__name__}: {error}")


def failures(
    verdict: Verdict,
    noticed: float,
    local_ranks: Mapping[int, int],
    processes: Mapping[int, subprocess.Popen[bytes]],
    error_files: Mapping[int, str],
) -> dict[int, ProcessFailure]:
    """Return the workers that failed by themselves, by rank, the first failure first.

    Survivors, which were told to exit or were ended, are left out. torch takes the failure with the earliest
    time as the cause, and the first of several failures with the same time.

    Args:
        verdict: the end of the incident.
        noticed: when the agent learnt of the fault, in Unix seconds.
        local_ranks: of the workers of the node, by rank.
        processes, error_files: of the workers, by local rank.
    """
    by_rank = {}
    for rank in verdict.fault.ranks or (verdict.cause_rank,):
        if rank in local_ranks:
            local_rank = local_ranks[rank]
            by_rank[rank] = _failure(local_rank, verdict, processes[local_rank], error_files[local_rank])
        elif rank == verdict.cause_rank:  # a rank of another node; -1: no single rank
            by_rank[rank] = ProcessFailure(-1, verdict.fault.pid, verdict.exit_code, error_file="")
            by_rank[rank].message = verdict.line
        if rank in by_rank:
            by_rank[rank].timestamp = int(noticed)
    return by_rank


def _failure(
    local_rank: int, verdict: Verdict, process: subprocess.Popen[bytes], error_file: str
) -> ProcessFailure:
    # A worker that hung was told to exit, too, and may have exited with 0.
    code = process.poll() or verdict.exit_code
    try:
        failure = ProcessFailure(local_rank, process.pid, code, error_file)
    except Exception:  # torch has reported a damaged file: an empty one where the disk was full
        failure = ProcessFailure(local_rank, process.pid, code, error_file="")
    if code > 0 and failure.error_file == _NO_FILE:
        failure.message = verdict.line
    return failure


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
    """The part of an executor that torch uses; the end of the interpreter does not wait for its threads."""

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
