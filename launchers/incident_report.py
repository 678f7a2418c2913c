"""The report of an incident: its timeline is collected meanwhile, and written to a file when it has ended."""

from __future__ import annotations

import json
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import TypedDict

from adaptor import output
from adaptor.protocol.messages import (
    AgentLost,
    AgentTerminationRequested,
    Died,
    Dump,
    Dying,
    Exit,
    Find,
    Freeze,
    Frozen,
    Hello,
    Joined,
    Layout,
    NodeStalled,
    Prepare,
    Publish,
    Published,
    PublishFailed,
    Raised,
    Regroup,
    RegroupFailed,
    Rename,
    Renamed,
    Replace,
    Resumed,
    TerminationRequested,
    TimelineEvent,
    ToController,
    Unprotected,
    Verdict,
    WriteFailed,
)

_log = logging.getLogger("adaptor")

_ORDERS: dict[type, str] = {
    Freeze: "freeze",
    Replace: "replace",
    Regroup: "regroup-ordered",
    Dump: "dump-ordered",
    Prepare: "prepare",
    Publish: "publish-ordered",
    Find: "find-ordered",
    Rename: "rename-ordered",
    Exit: "exit",
}
# Logged at DEBUG only: a line takes longer than the decision about one rank, so with thousands of ranks these
# would hold orders back. The report has all of them.
_OF_EACH_RANK = {"freeze", "frozen", "dump-ordered", "exit", "regroup-ordered", "joined"}


class Event(TypedDict):
    """A line of a timeline: what happened at `t` (Unix seconds), where rank and node are known."""

    t: float
    rank: int | None
    node: int | None
    what: str
    detail: str


class IncidentReport:
    """Collects messages and orders with wall-clock times, and writes `incident-<time in UTC>-<n>.json`.

    The report is written in a thread of its own, which is there before an incident.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).absolute()
        self._writer = output.Writer("ttp-report")
        self._writer.start()
        self._events: list[Event] = []
        self._ended = False
        self._noticed: set[int] = set()  # ranks whose faults are in the timeline
        self._still_s = 0.0
        self._over = 0  # the newest incident that has ended without a verdict
        self.next_incident = 1
        self.path = ""  # the path of the last one

    def record_message(self, node: int, message: ToController, now: float | None = None) -> None:
        """Record a message of the agent of `node`, or of a worker by way of it.

        Args:
            node: the node that it came from.
            message: the message.
            now: when it came, in Unix seconds; by default now.
        """
        now = time.time() if now is None else now
        match message:
            case Layout(rank=rank, origin=origin):
                _log.debug("rank %d: begins to train after step %d", rank, origin)
            case Unprotected(rank=rank, why=why):
                _log.warning("rank %d: not protected: %s", rank, why)
            case Dying(rank=rank, at=at, board=board) if not self._ended:
                self._noticed.add(rank)
                self._add("fault-noticed", at, rank, node, f"{board.phase_name} after step {board.finished}")
            case Died(rank=rank, status=status, at=at, board=board) if not self._ended and status != 0:
                where = f"status {status}, {board.phase_name} after step {board.finished}"
                self._add("died" if rank in self._noticed else "fault-noticed", at, rank, node, where)
            case Raised(rank=rank, error=error) if not self._ended:
                self._noticed.add(rank)
                self._add("fault-noticed", now, rank, node, error)
            case TerminationRequested(rank=rank, signal=name) if not self._ended:
                self._noticed.add(rank)
                self._add("fault-noticed", now, rank, node, f"told to end by {name}")
            case AgentTerminationRequested(signal=name, error=error) if not self._ended:
                self._add("fault-noticed", now, None, node, error or f"told to end by {name}")
            case NodeStalled(seconds=seconds):
                self._still_s = seconds
            case AgentLost():
                self._add("fault-noticed", now, None, node, "the connection to the agent is gone")
            case Frozen(incident=number) | TimelineEvent(incident=number) if number <= self._over:
                pass  # it comes late: the report is written
            case Hello(rank=rank, pid=pid) if self._events:
                self._add("started", now, rank, node, f"pid {pid}")
            case Joined(rank=rank, step=step):
                self._add("joined", now, rank, node, f"step {step}")
            case RegroupFailed(rank=rank, reason=reason):
                self._add("failed", now, rank, node, reason)
            case Frozen(rank=rank, board=board):
                self._add("frozen", now, rank, node, f"{board.phase_name} after step {board.finished}")
            case TimelineEvent(rank=rank, at=at, what=what, detail=detail):
                self._add(what, at, rank, node, detail)
            case WriteFailed(rank=rank, reason=reason):
                self._add("failed", now, rank, node, reason)
            case Renamed(rank=rank, reason=reason):
                self._add("failed" if reason else "renamed", now, rank, node, reason)
            case Published(step=step):
                self._add("published", now, None, node, f"step {step}")
            case PublishFailed(reason=reason):
                self._add("failed", now, None, node, reason)

    def record_takeover(self, node: int) -> None:
        """Record that the controller is on `node` from now on."""
        self._add("took-over", time.time(), None, node, "the controllers of earlier terms are lost")

    def record_order(self, node: int, rank: int | None, order: object, now: float | None = None) -> None:
        """Record an order of the controller; a verdict ends the incident, and writes the report.

        Args:
            node: the node that it goes to.
            rank: the rank that it is for; None: for the agent itself.
            order: the order.
            now: when it was given, in Unix seconds; by default now.
        """
        now = time.time() if now is None else now
        if isinstance(order, Verdict):
            if not self._ended:
                self._ended = True
                self._add("verdict", now, None, None, order.outcome)
                self._write(order)
            return
        if isinstance(order, Resumed):
            if self._over < order.incident:  # once, though every agent is told
                self._over = order.incident
                self._add("resumed", now, None, None, f"step {order.step}")
                self._write(order)
                self.begin()
            return
        if isinstance(order, Freeze) and order.stacks and not self._events:
            self._add("fault-noticed", now, None, None, f"nothing has moved for {self._still_s:.0f} s")
        what = _ORDERS.get(type(order), "")
        if what:
            step = getattr(order, "step", None)
            self._add(what, now, rank, node, "" if step is None else f"step {step}")

    def close(self) -> None:
        """Wait for reports that are being written, for a bounded time."""
        self._writer.close()

    def begin(self) -> None:
        """Start a new timeline, for a new generation of workers."""
        self._events, self._ended, self._noticed = [], False, set()

    def _add(self, what: str, at: float, rank: int | None, node: int | None, detail: str) -> None:
        who = f"rank {rank}" if rank is not None else f"node {node}" if node is not None else "job"
        _log.log(logging.DEBUG if what in _OF_EACH_RANK else logging.INFO, "%s: %s %s", who, what, detail)
        self._events.append({"t": at, "rank": rank, "node": node, "what": what, "detail": detail})

    def _write(self, end: Verdict | Resumed) -> None:
        if isinstance(end, Verdict) and end.outcome == "refused":
            return
        self.next_incident = end.incident + 1
        name = f"incident-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{end.incident}.json"
        path = self._folder / name
        self.path = str(path)
        self._writer.submit(partial(_write_report, path, end, list(self._events)))


def _write_report(path: Path, end: Verdict | Resumed, events: list[Event]) -> None:
    if isinstance(end, Resumed):
        cause, outcome, stop = next(iter(end.fault.ranks), -1), "resumed", ""
    else:
        cause, outcome, stop = end.cause_rank, end.outcome, end.stop
    report = {
        "incident": end.incident,
        "fault": _fault_of(cause, events),
        "step": end.step,
        "cause_rank": cause,
        "ranks": sorted({event["rank"] for event in events if event["rank"] is not None}),
        "events": sorted(events, key=lambda event: event["t"]),
        "verdict": {"nothing": "nothing-to-save"}.get(outcome, outcome),
        "reason": end.line,
        "host": end.fault.host,
        "pid": end.fault.pid,
        "not_started_again": stop,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(report, indent=1))
        scratch.replace(path)
    except OSError as error:
        output.tell(f"[ttp] the incident report cannot be written: {error}")


def _fault_of(cause: int, events: list[Event]) -> Event | None:
    """Return the event of the rank `cause`; survivors may have reported exceptions before it."""
    noticed = [event for event in events if event["what"] == "fault-noticed"]
    for event in noticed:
        if event["rank"] == cause:
            return event
    if not noticed:
        return None
    return {**noticed[0], "rank": cause if cause >= 0 else noticed[0]["rank"]}
