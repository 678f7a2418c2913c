"""Collects the events of an incident, and has its report (`incident_record`) written after its end."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

from adaptor.controller.incident_state import Orders
from adaptor.launchers.records.incident_record import (
    NOTICED,
    ORDERS,
    GoneOn,
    Happened,
    IncidentFile,
    Seen,
    Timeline,
    incident_of,
)
from adaptor.launchers.records.job_files import JobFiles
from adaptor.launchers.records.log import TrackerReading
from adaptor.launchers.records.notices import notice_of_end, notice_of_save
from adaptor.protocol import records
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    AgentTerminationRequested,
    ComputeTime,
    ComputeTimes,
    Corruption,
    Died,
    Drilled,
    Dump,
    Dying,
    EndScript,
    Exit,
    Freeze,
    Frozen,
    Hello,
    Joined,
    Layout,
    NodeStalled,
    Publish,
    Published,
    PublishFailed,
    Raised,
    Recovered,
    Regroup,
    RegroupFailed,
    Renamed,
    SaveEnded,
    TerminationRequested,
    TimelineEvent,
    ToController,
    Unprotected,
    Verdict,
    Verified,
    WriteFailed,
)
from adaptor.verification.transcript import OpenSteps

_log = logging.getLogger("adaptor")

# Logged at DEBUG only: a line takes longer than the decision about one rank, so with thousands of ranks
# these lines would delay orders. The report has all events.
_OF_EACH_RANK = {
    *("calls", "collectives", "freeze", "frozen"),
    *("dump-ordered", "exit", "regroup-ordered", "joined"),
}
# Orders that are formatted only when the file is written, unless each order is a line of the log.
_SEEN = frozenset({Freeze, Dump, EndScript, Exit, Regroup})

# The report has the calls of the first exceptions: most later exceptions follow from an earlier one.
MOST_CALLS = 16


class IncidentReport:
    """Collects messages and orders with wall-clock times; writes events, and a file for each incident.

    Args:
        notify: takes the function that makes a notice, calls the function later in another thread, and never
            waits.
    """

    def __init__(
        self, files: JobFiles, notify: Callable[[Callable[[], records.Notice]], None] = lambda make: None
    ) -> None:
        self._files = files
        self._notify = notify
        self._generation = 0
        self._records = False  # whether the controller is, or was last, on this node
        self._happened: list[Happened | Seen] = []
        self._nodes: dict[int, int] = {}
        self._hosts: dict[int, str] = {}
        self._pids: dict[int, int] = {}
        self._ended = False
        self._noticed: set[int] = set()  # ranks whose faults are in the timeline
        self._still_s = 0.0
        self._checkpoint: str | None = None  # the folder that was published
        self._size: int | None = None  # of its files, in bytes
        self._over = 0  # the newest incident that ended without a verdict
        # The last file; of an earlier generation, until that has gone on.
        self._last: IncidentFile | None = None
        self._started = self._trained = 0.0  # when the last rank had started, and had begun to train
        self._origin = -1  # the step from which it began
        self._loaded = 0  # the step from which this generation began
        self._finished = -1  # the newest step that a rank of this node has finished in the generation
        self._save = ""  # the folder of checkpoints
        self._unprotected = False
        self.open_words = ""  # the state of an open incident, in words; '' if unknown
        self.next_incident = 1
        self.incidents = 0  # ended incidents of the job
        self.failed_saves = 0  # of the framework, one after the other
        self.failed_save = ""  # the newest failed save, with its reason
        self.drilled: tuple[int, float, str] | None = None  # step, time and problem of the newest drill
        self.compute_times: dict[int, ComputeTime] = {}  # by rank, in this generation
        self._open_steps = OpenSteps()
        self.path = ""  # the path of the last report
        self.last_id: str | None = None

    def record_message(self, node: int, message: ToController, time_now: float | None = None) -> None:
        """Record a message of the agent of `node`, or of a worker through the agent.

        Args:
            node: the sending node.
            time_now: the time of arrival, in Unix seconds; by default now.
        """
        time_now = time.time() if time_now is None else time_now
        if type(message) is Frozen and not _log.isEnabledFor(logging.DEBUG):
            if message.incident > self._over:  # the report of an ended incident is written
                pid = message.board.pid or self._pids.get(message.rank)
                self._happened.append(Seen(time_now, node, message.rank, message, pid))
            return
        if isinstance(message, (Dying, Died, Frozen)) and message.board.pid:
            # The only source of the pid of a process that ends before its Hello.
            self._pids[message.rank] = message.board.pid
        match message:
            case AgentHello(node=agent_node, host=host):
                self._hosts[agent_node] = host
            case Layout(rank=rank, origin=origin, save_folder=save):
                _log.debug("rank %d: begins to train after step %d", rank, origin)
                self._trained, self._origin = time_now, origin
                self._loaded, self._save = max(0, origin), save
            case SaveEnded(step=step, reason=reason):
                self._record_save(step, reason, time_now)
            case Drilled(step=step, lost=lost, problem=problem):
                self.drilled = (step, time_now, f"without rank {lost}: {problem}" if problem else "")
            case ComputeTimes(times=times):
                self.compute_times = self.compute_times | times
            case Verified():
                line = self._open_steps.add(message, records.utc(time_now))
                if line is not None:
                    self._files.append_verified(line)
            case Unprotected(rank=rank, why=why):
                self._unprotected = True
                _log.warning("rank %d: not protected: %s", rank, why)
            case Dying(rank=rank, at=at, board=board) if not self._ended:
                self._noticed.add(rank)
                self._add(NOTICED, at, rank, node, f"{board.phase_name} after step {board.finished}")
            case Died(rank=rank, status=status, at=at, board=board) if not self._ended and status != 0:
                reason_text = f" ({message.why})" if message.why else ""
                state_text = f"status {status}{reason_text}, {board.phase_name} after step {board.finished}"
                self._add("died" if rank in self._noticed else NOTICED, at, rank, node, state_text)
            case Raised(rank=rank, error=error, calls=calls) if not self._ended:
                self._noticed.add(rank)
                self._add(NOTICED, time_now, rank, node, error)
                if calls and len(self._noticed) <= MOST_CALLS:
                    self._add("calls", time_now, rank, node, calls)
            case Corruption() if not self._ended:
                self._record_corruption(message, time_now)
            case TerminationRequested(rank=rank, signal=name) if not self._ended:
                self._noticed.add(rank)
                self._add(NOTICED, time_now, rank, node, f"told to end by {name}")
            case AgentTerminationRequested(signal=name, error=error) if not self._ended:
                self._add(NOTICED, time_now, None, node, error or f"told to end by {name}")
            case NodeStalled(seconds=seconds) if not self._happened:  # repeated during the incident
                self._still_s = seconds
            case AgentLost():
                self._add(NOTICED, time_now, None, node, "the connection to the agent is gone")
            case Frozen(incident=number) | TimelineEvent(incident=number) if number <= self._over:
                pass  # the report is already written
            case Hello(rank=rank, pid=pid):
                self._nodes[rank], self._pids[rank] = node, pid
                if self._happened:
                    self._add("started", time_now, rank, node, f"pid {pid}")
                else:
                    self._started = time_now
            case Joined(rank=rank, step=step):
                self._add("joined", time_now, rank, node, step=step)
            case RegroupFailed(rank=rank, reason=reason):
                self._add("failed", time_now, rank, node, reason)
            case Frozen(rank=rank, board=board):
                self._add("frozen", time_now, rank, node, f"{board.phase_name} after step {board.finished}")
            case TimelineEvent(rank=rank, at=at, what=what, detail=detail):
                self._add(what, at, rank, node, detail)
            case WriteFailed(rank=rank, reason=reason):
                self._add("failed", time_now, rank, node, reason)
            case Renamed(rank=rank, reason=reason):
                self._add("failed" if reason else "renamed", time_now, rank, node, reason)
            case Published(step=step, path=path):
                self._checkpoint = path
                self._add("published", time_now, None, node, step=step)
            case PublishFailed(reason=reason):
                self._add("failed", time_now, None, node, reason)

    def _record_save(self, step: int, reason: str, now: float) -> None:
        """Record failed saves of the framework, and the first successful save after a failure."""
        failed = self.failed_saves
        self.failed_saves, self.failed_save = (failed + 1, f"step {step}: {reason}") if reason else (0, "")
        if reason:
            self._tell("save-failed", now, detail=reason, step=step)
        elif failed:
            self._tell("saved-again", now, step=step)
        # One notice per series: an operator has to act once.
        if (failed == 0) == bool(reason):
            job, time_ = self._files.job, records.utc(now)
            self._notify(partial(notice_of_save, job, step, reason, time_))

    def record_takeover(self, node: int) -> None:
        """Record that the controller runs on this `node` from now on; no workers are started."""
        self._records = True
        self._add("took-over", time.time(), None, node, "the controllers of earlier terms are lost")

    def note_orders(self, orders: Orders, time_now: float) -> Orders:
        """Note the orders of which each rank gets one, given at `time_now`, in Unix seconds.

        Returns:
            The other orders, for `record_order`.
        """
        if _log.isEnabledFor(logging.DEBUG):
            return orders
        remaining_orders, note = [], self._happened.append
        for addressed_order in orders:
            node, order = addressed_order
            if type(order) is not Addressed or type(order.message) not in _SEEN:
                remaining_orders.append(addressed_order)
            elif self._happened:
                note(Seen(time_now, node, order.rank, order.message, self._pids.get(order.rank)))
            else:  # the first event of a timeline may need another event before it
                self.record_order(node, order.rank, order.message, time_now)
        return remaining_orders

    def record_order(self, node: int, rank: int | None, order: object, time_now: float | None = None) -> None:
        """Record an order of the controller; a verdict ends the incident and writes the report.

        Args:
            node: the receiving node.
            rank: the receiving rank; None: the agent itself.
            time_now: the time of the order, in Unix seconds; by default now.
        """
        time_now = time.time() if time_now is None else time_now
        if isinstance(order, Verdict):
            if not self._ended:
                self._ended = True
                self._add("verdict", time_now, None, None, order.outcome)
                self._write(order, time_now)
            return
        if isinstance(order, Recovered):
            if self._over < order.incident:  # once, although every agent gets the order
                self._over = order.incident
                self._add("recovered", time_now, None, None, step=order.step)
                self._write(order, time_now)
                self._started, self._trained, self._origin = 0.0, time_now, order.step
                self._reset()
            return
        if isinstance(order, Freeze) and order.stacks and not self._happened:
            description, still = f"nothing has moved for {self._still_s:.0f} s", f"{self._still_s:.3f}"
            self._add(NOTICED, time_now, None, None, description, further_data={records.STILL: still})
        if isinstance(order, Publish):
            self._size = sum(entry.bytes for entry in order.files)
        event_name = ORDERS.get(type(order), "")
        if event_name:
            self._add(event_name, time_now, rank, node, step=getattr(order, "step", None))

    def record_end(self, incident: int) -> None:
        """Note the end of `incident`, whichever node has written its file."""
        self.next_incident = max(self.next_incident, incident + 1)
        self.incidents += 1

    def record_next_action(self, action: str) -> None:
        """Add the action after the verdict to the last file."""
        if self._records:
            self._tell("next-action", time.time(), detail=action)
            if self._last is not None:
                self._last.actions.append(action)
                self._files.write_incident(self._last.again)

    def record_progress(self, finished: int) -> None:
        """Note the newest finished step; the first finished step after a fault ends the recovery."""
        self._finished = max(self._finished, finished)
        last = self._last
        if last is not None and last.is_over(self._generation) and self._trained and finished > self._origin:
            self._last = None
            time_now = time.time()
            last.gone_on = GoneOn(last.ended, self._started, self._trained, time_now, self._origin)
            self._files.write_incident(last.again)
            self._notify(partial(last.notice, time_now, last.gone_on))
            self._tell("gone-on", time_now, step=finished)

    def record_training(self, load_s: float) -> None:
        """Record once per generation that every rank trains, and after which step.

        Args:
            load_s: seconds for loading a checkpoint.
        """
        event = Happened(self._trained or time.time(), "training", None, None, "", self._origin, None)
        self._files.append(partial(self._timeline([]).event, event, None, {records.LOAD: f"{load_s:.3f}"}))

    def record_start(self) -> None:
        """Record the start of a generation of workers whose controller runs on this node."""
        self._records = True
        self._tell("generation", time.time(), detail=f"start {self._generation} of the workers")

    def begin(self, generation: int) -> None:
        """Start a new timeline for a generation of workers, counted from 1."""
        self._reset()
        self._records = False
        self._generation = generation
        self._started = self._trained = 0.0
        self._finished, self._unprotected = -1, False
        self.compute_times = {}
        self._pids.clear()

    def close(self) -> None:
        """Record the end of ttprun; wait for pending writes for a bounded time."""
        if self._records:
            time_now = time.time()
            self._tell("ended", time_now)
            self._notify(partial(notice_of_end, self._files.job, self.incidents, records.utc(time_now)))
        self._files.close()

    def _reset(self) -> None:
        self._open_steps.clear()
        self._happened, self._ended, self._noticed = [], False, set()
        self._checkpoint, self._size, self._still_s = None, None, 0.0

    def _record_corruption(self, message: Corruption, time_now: float) -> None:
        """Record the first of the equal messages of all ranks."""
        ranks = message.named or message.suspects
        if self._noticed.issuperset(ranks):
            return
        self._noticed.update(ranks)
        role = "named" if message.named else "suspects"
        last = f"step {message.agreed}" if message.agreed >= 0 else "none"
        detail = f"{message.text}; {role}: rank {' and '.join(map(str, ranks))}; newest agreed: {last}"
        for rank in ranks:
            self._add(NOTICED, time_now, rank, self._nodes.get(rank), message.text)
        self._add("corruption", time_now, min(ranks), self._nodes.get(min(ranks)), detail)

    def _add(
        self,
        event_name: str,
        at: float,
        rank: int | None,
        node: int | None,
        detail: str = "",
        *,
        step: int | None = None,
        further_data: Mapping[str, str] | None = None,
    ) -> None:
        origin_text = f"rank {rank}" if rank is not None else f"node {node}" if node is not None else "job"
        about = detail if step is None else f"step {step}"
        level = logging.DEBUG if event_name in _OF_EACH_RANK else logging.INFO
        _log.log(level, "%s: %s %s", origin_text, event_name, about)
        pid = None if rank is None else self._pids.get(rank)
        event = Happened(at, event_name, rank, node, detail, step, pid)
        self._happened.append(event)
        if event_name not in _OF_EACH_RANK:
            self._files.append(partial(self._timeline([]).event, event, self.next_incident, further_data))

    def _tell(self, event_name: str, at: float, *, detail: str = "", step: int | None = None) -> None:
        """Append an event outside of incidents."""
        event = Happened(at, event_name, None, None, detail, step, None)
        self._files.append(partial(self._timeline([]).event, event, None))

    def _timeline(self, happened: Sequence[Happened | Seen]) -> Timeline:
        return Timeline(
            self._files.job,
            self._generation,
            happened,
            silent_s=self._still_s,
            nodes=self._nodes,
            hosts=self._hosts,
        )

    def _write(self, end: Verdict | Recovered, time_now: float) -> None:
        if isinstance(end, Verdict) and end.outcome == "refused":
            return
        self.next_incident = max(self.next_incident, end.incident + 1)
        self.last_id = f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(time_now))}-{end.incident}"
        self.path = str(self._files.incident_path(self.last_id))
        timeline = dataclasses.replace(
            self._timeline(self._happened),
            checkpoint=self._checkpoint,
            size=self._size if self._checkpoint is not None else None,
            nodes=dict(self._nodes),
            hosts=dict(self._hosts),
            newest=self._finished,
            again=cache(partial(_start_of, getattr(end, "save_folder", "") or self._save, self._loaded)),
            unprotected=self._unprotected,
        )
        make = partial(incident_of, end, timeline, self.last_id, time_now)
        self._last = IncidentFile(make, time_now, self._generation, online=isinstance(end, Recovered))
        self._files.write_incident(self._last.again)
        self._notify(partial(self._last.notice, time_now, None))


def _start_of(save: str, loaded: int) -> int | None:
    """Return the first step of another start; None if the disk does not answer in time.

    Args:
        loaded: the step from which the workers began, possibly in another folder.
    """
    named = TrackerReading(save).step
    return None if named is None else max(named, loaded)
