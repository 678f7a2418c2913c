"""The lines of the agent: its log, and for the operator a line at each fault, each restart, and the end.

The log has times in UTC. It is a file, made on demand; and stdout, if requested. The lines for the operator
come from the incidents and restarts in an `Account`, which `RunRecord` gives to `ttprun`.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from adaptor import output, text, threads
from adaptor.checkpoint.tracker import tracked_step
from adaptor.config import Config
from adaptor.launchers.spares.spare_node import Taken
from adaptor.protocol.messages import Fault, Recovered, Verdict
from adaptor.protocol.spare_messages import SpareHello, TakePlace

_log = logging.getLogger("adaptor")
# The disk of the save folder may hang. The last line waits PROMPT_S for the tracker, which is read while the
# workers end; after that ttprun waits TRACKER_S to print the tracker in a separate line.
PROMPT_S = 0.5
TRACKER_S = 2.0


def tell_error(subject: str, error: BaseException) -> None:
    """Print an internal error of ttprun with its traceback, and log it.

    The traceback reads source files, and their disk may hang: call this after the decision.

    Args:
        subject: the beginning of the line.
    """
    page = f"{subject}: {text.trace(error)}"
    output.tell(f"[ttp] {page}")
    _log.error("%s", page)


class Log:
    """The handler of the logger `adaptor`, until it is closed.

    A separate thread writes the log file: its folder may be removed during training, its disk may hang.
    """

    def __init__(self, config: Config) -> None:
        name = f"ttp-agent-{socket.gethostname()}-{os.getpid()}.log"
        self._logger = _log
        self._logger.setLevel(config.log_level)
        self._logger.propagate = False
        self._file = _QueuedFile(Path(config.log_path) / name)
        self._handlers: list[logging.Handler] = [self._file]
        if config.log_stdout:
            self._handlers.append(_Stdout())
        for handler in self._handlers:
            handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
            self._logger.addHandler(handler)

    def close(self) -> None:
        """Write the remaining records, for a bounded time."""
        for handler in self._handlers:
            self._logger.removeHandler(handler)
            handler.close()
        self._logger.propagate = True


class _Formatter(logging.Formatter):
    """Writes times as 2026-01-31T12:00:00.000Z."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class _Quiet(logging.Handler):
    """A handler that drops records it cannot format: logging itself would print, and might block."""

    def handleError(self, record: logging.LogRecord) -> None:
        return


class _Stdout(_Quiet):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            output.tell(self.format(record), to="stdout")
        except Exception:
            self.handleError(record)


class _WatchedFile(_Quiet, logging.handlers.WatchedFileHandler):
    """A file that is opened again after it was moved or removed."""


class _QueuedFile(_Quiet):
    """Queues records for a `Writer`, whose thread opens and writes the file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._writer = output.Writer("ttp-log")
        self._writer.start()
        self._file: _WatchedFile | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = logging.makeLogRecord({"msg": self.format(record)})
        except Exception:
            self.handleError(record)
            return
        self._writer.submit(partial(self._write, line))

    def _write(self, line: logging.LogRecord) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # the folder may have been removed
        if self._file is None:
            self._file = _WatchedFile(self._path, encoding="utf-8", errors="backslashreplace")
        self._file.emit(line)

    def close(self) -> None:
        self._writer.submit(self._close_file)
        self._writer.close()
        super().close()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()


class TrackerReading:
    """The tracker of a save folder, read at once in another thread, because the disk may hang.

    Args:
        save: the folder; '' without one.
    """

    def __init__(self, save: str) -> None:
        self.save = save
        self._read: threads.Background[tuple[int | None]] | None = None
        if save:
            with contextlib.suppress(RuntimeError):  # no thread: no reading
                self._read = threads.Background(lambda: (tracked_step(Path(save)),), "ttp-tracker")

    @property
    def answers(self) -> bool:
        """Return whether the disk answers at once, or no folder is set."""
        return self._read is None or self._read.within(PROMPT_S) is not None

    @property
    def step(self) -> int | None:
        """Return the step in the tracker, 0 without a checkpoint; None if unknown."""
        tracker_answer = self._answer
        return None if tracker_answer is None else tracker_answer[0] or 0

    @property
    def words(self) -> str:
        """Name the newest checkpoint; '' if the disk hangs, or without a folder."""
        tracker_answer = self._answer
        if tracker_answer is None:
            return ""
        if tracker_answer[0] is None:
            return f"no checkpoint is in {self.save}"
        return f"the newest checkpoint in {self.save} is step {tracker_answer[0]}"

    @property
    def _answer(self) -> tuple[int | None] | None:
        return None if self._read is None else self._read.within(TRACKER_S)


class Account:
    """The count of incidents, restarts and lost steps of an agent, from its start to its end.

    Args:
        restarts: the number of allowed restarts (--max-restarts).
        begun_restarts: the restarts before the node joined.

    Attributes:
        begun: the restarts of the job so far.
        incidents: the ended incidents.
        joined: the job had workers before this node came: its incidents until then are not counted.
    """

    def __init__(self, restarts: int, begun_restarts: int = 0) -> None:
        self._restarts = restarts
        self.begun = begun_restarts
        self._again = ""  # the last start, in words
        self._cause = ""  # of the last start, in words
        self._last: Verdict | None = None  # the last verdict since training went on
        self._newest = -1  # the newest finished step before the faults since then
        self._has_trained = False  # training that is protected has begun
        self._origin = 0  # the step from which training last went on
        self._noticed = 0.0  # the first of these faults, on the monotonic clock
        self._reports = ""
        self._tracker = TrackerReading("")  # of the last incident's save folder
        self.incidents = 0
        self.joined = False
        self._recoveries = 0  # incidents that needed no restart
        self._lost: int | None = 0  # finished steps that must be trained again; None: not known

    def fault(self, verdict: Verdict, noticed: float, report: str) -> None:
        """Write the line of an ended incident.

        Args:
            verdict: on the incident.
            noticed: when the agent learnt of the fault, in Unix seconds.
            report: the path of the report, or the node with the report.
        """
        self.incidents += 1
        self._tracker = TrackerReading(verdict.save_folder)
        if self._last is None:
            self._newest, self._noticed = -1, time.monotonic() - max(0.0, time.time() - noticed)
        self._last = verdict
        if verdict.unprotected:
            self._lost = None
        self._newest = max(self._newest, verdict.newest)
        self._say_incident(verdict.incident, _failed_process(verdict), noticed, report)

    def recovered(self, recovered: Recovered, report: str) -> None:
        """Write the lines of an incident after which the job goes on without a restart."""
        self.incidents += 1
        self._recoveries += 1
        self._add(recovered.made_again)
        who = _rank(recovered.fault, next(iter(recovered.fault.ranks), -1))
        self._say_incident(recovered.incident, who, time.time() - recovered.seconds, report)
        say(recovered.line)

    def _say_incident(self, number: int, failed_rank: list[str], noticed: float, report: str) -> None:
        """Write the time of the notice, the failed rank or agent, and the path of the report."""
        parts = [f"{_utc(noticed)} incident {number}", *failed_rank]
        if report:
            parts.append(f"report {report}")
            self._reports = f"in {Path(report).parent}" if Path(report).is_absolute() else report
        say(", ".join(parts))

    def look_again(self) -> None:
        """Read the tracker of the save folder again, for a newer checkpoint than in the incident."""
        self._tracker = TrackerReading(self._tracker.save)

    def restart(self) -> str:
        """Count a restart that is about to begin; return its number in words."""
        self.begun += 1
        self._again, self._cause = f"restart {self.begun} of {self._restarts}", "the fault"
        return self._again

    def join(self) -> str:
        """Note a start of the workers on more nodes; return the start in words."""
        self._again, self._cause = "start on more nodes", "the new nodes were noticed"
        return self._again

    def training_began(self, origin: int, at: float) -> None:
        """Write the line of a restart, after training goes on.

        Args:
            origin: the step from which training goes on.
            at: the beginning, on the monotonic clock.
        """
        self._origin, self._has_trained = origin, True
        last, self._last = self._last, None
        if last is None:
            return
        lost = None if self._newest < 0 and last.outcome == "lost" else max(0, self._newest - origin)
        self._add(lost)
        delay = f"{max(0.0, at - self._noticed):.1f} s after {self._cause}"
        say(f"{_utc(time.time())} {self._again}: from step {origin}, {_lost(lost)}, {delay}")

    def _add(self, lost: int | None) -> None:
        self._lost = None if lost is None or self._lost is None else self._lost + lost

    def ended(self) -> None:
        """Write the sum of all incidents, if any, at the end of a job."""
        last = self._last
        if last is not None and (
            last.outcome == "lost" or (last.outcome == "nothing" and not self._has_trained)
        ):
            self._add(None)
        if self.incidents:
            say(f"{_utc(time.time())} the job has come to its end, {self._sum}")

    def failed(self, line: str) -> None:
        """Print the `line` of the final verdict, and the sum of all incidents before.

        If the save folder hangs, the line comes first and the rest follows.
        """
        tell = [partial(self._tell_all, self._tracker), partial(conclude, line, tracker=self._tracker)]
        if not self._tracker.answers:
            tell.reverse()
        for report_line in tell:
            report_line()

    def _tell_all(self, tracker: TrackerReading) -> None:
        last = self._last
        if last is not None and last.outcome == "lost":
            step = tracker.step
            is_known = step is not None and self._newest >= 0
            self._add(max(0, self._newest - max(step or 0, self._origin)) if is_known else None)
        if self.incidents > 1:
            end_text = "was ended" if last is not None and last.is_requested else "has failed"
            say(f"{_utc(time.time())} the job {end_text}, {self._sum}")

    @property
    def _sum(self) -> str:
        several = "" if self.incidents == 1 else "s"
        without = f" ({self._recoveries} without a restart)" if self._recoveries else ""
        since = " since this node came" if self.joined else ""
        reports_place = f"; reports {self._reports}" if self._reports else ""
        return f"{self.incidents} incident{several}{without}{since}, {_lost(self._lost)}{reports_place}"


@dataclass
class RunRecord:
    """The notes of the agent for `ttprun`; torch elastic itself returns only an exit code.

    Attributes:
        verdict: the last verdict; None without one
        refused_after: the verdict before `verdict`, if `verdict` refuses to go on after a fault
        has_started: whether workers were started
        save_folder: of the last generation, '' without training
        stopped: why remaining restarts are not used, as a part of the last line
        account: of incidents, restarts and lost steps
        end_agent: ends the agent's control thread; returns whether the thread had failed. The function keeps
            the agent alive: torch's rendezvous must not be deleted while its own thread uses it
        facts: of the node, which must be the same on all nodes of the job
        script: the script or module of the job, as in the command
        common: the facts that a spare node must share with this node; None: the job takes no spare nodes
        taken: the place that this spare node has taken; None for other nodes
    """

    verdict: Verdict | None = None
    refused_after: Verdict | None = None
    has_started: bool = False
    save_folder: str = ""
    stopped: str = ""
    account: Account = field(default_factory=lambda: Account(0))
    end_agent: Callable[[], bool] = lambda: False
    facts: dict[str, str] = field(default_factory=dict)
    script: str = ""
    common: SpareHello | None = None
    taken: Taken | None = None

    @property
    def place(self) -> TakePlace | None:
        """Return the place that the spare node has taken; None for other nodes."""
        return self.taken.place if self.taken is not None else None


def conclude(line: str, save: str = "", tracker: TrackerReading | None = None) -> None:
    """Print the last `line` of a job, with the newest checkpoint in `save`; two lines if the disk hangs."""
    tracker = TrackerReading(save) if tracker is None else tracker
    if tracker.answers:
        say("; ".join(filter(None, [line, tracker.words])))
        return
    say(line)
    if tracker.words:
        say(tracker.words)


def say(line: str) -> None:
    """Write a line for the user."""
    output.tell(f"[ttp] {line}")


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _failed_process(verdict: Verdict) -> list[str]:
    if verdict.cause_rank < 0:
        location = _location(verdict.fault)
        return [f"ttprun ({location})"] if location else []
    return _rank(verdict.fault, verdict.cause_rank)


def _rank(fault: Fault, rank: int) -> list[str]:
    """Return the failed rank, with its process, machine and progress."""
    if rank < 0:
        return []
    location = _location(fault)
    return list(filter(None, [f"rank {rank}" + (f" ({location})" if location else ""), fault.when]))


def _location(fault: Fault) -> str:
    fault_parts = [f"pid {fault.pid}" if fault.pid else "", f"host {fault.host}" if fault.host else ""]
    return ", ".join(filter(None, fault_parts))


def _lost(count: int | None) -> str:
    if count is None:
        return "steps lost: not known"
    return f"{count} step{'' if count == 1 else 's'} lost"
