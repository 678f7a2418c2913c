"""The timeline of an incident, and the report that is written when it has ended."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

from adaptor.control.messages import (
    AgentLost,
    Died,
    Dump,
    Dying,
    Exit,
    Find,
    Freeze,
    Frozen,
    Layout,
    Leave,
    Noted,
    Prepare,
    Publish,
    Published,
    PublishFailed,
    Raised,
    Rename,
    Renamed,
    Still,
    ToController,
    Told,
    Verdict,
    WriteFailed,
)

_log = logging.getLogger("adaptor")

_ORDERS = {
    Freeze: "freeze",
    Dump: "dump-ordered",
    Prepare: "prepare",
    Publish: "publish-ordered",
    Find: "find-ordered",
    Rename: "rename-ordered",
    Exit: "exit",
}
# A line of the log takes longer than to decide what one rank is to do, so where there are thousands of ranks
# these would keep orders back. All of it is in the report.
_OF_EACH_RANK = {"freeze", "frozen", "dump-ordered", "exit"}


class Chronicle:
    """Collects what is heard and ordered, with wall-clock times, and writes `incident-<time>-<n>.json`."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._events: list[dict[str, Any]] = []
        self._ended = False
        self._noticed: set[int] = set()  # ranks whose faults are in the timeline
        self._still_s = 0.0
        self.next_incident = 1

    def heard(self, node: int, message: ToController) -> None:
        """A message of the agent of `node`, or of a worker by way of it."""
        match message:
            case Layout(rank=rank, origin=origin):
                _log.debug("rank %d: begins to train after step %d", rank, origin)
            case Dying(rank=rank, at=at, board=board) if not self._ended:
                self._noticed.add(rank)
                self._add("fault-noticed", at, rank, node, f"{board.phase_name} after step {board.finished}")
            case Died(rank=rank, status=status, at=at, board=board) if not self._ended and status != 0:
                where = f"status {status}, {board.phase_name} after step {board.finished}"
                self._add("died" if rank in self._noticed else "fault-noticed", at, rank, node, where)
            case Raised(rank=rank, error=error) if not self._ended:
                self._noticed.add(rank)
                self._add("fault-noticed", time.time(), rank, node, error)
            case Told(rank=rank, signal=name) if not self._ended:
                self._noticed.add(rank)
                self._add("fault-noticed", time.time(), rank, node, f"told to end by {name}")
            case Leave(signal=name) if not self._ended:
                self._add("fault-noticed", time.time(), None, node, f"told to end by {name}")
            case Still(seconds=seconds):
                self._still_s = seconds
            case AgentLost():
                self._add("fault-noticed", time.time(), None, node, "the connection to the agent is gone")
            case Frozen(rank=rank, board=board):
                self._add(
                    "frozen", time.time(), rank, node, f"{board.phase_name} after step {board.finished}"
                )
            case Noted(rank=rank, at=at, what=what, detail=detail):
                self._add(what, at, rank, node, detail)
            case WriteFailed(rank=rank, reason=reason):
                self._add("failed", time.time(), rank, node, reason)
            case Renamed(rank=rank, reason=reason):
                self._add("failed" if reason else "renamed", time.time(), rank, node, reason)
            case Published(step=step):
                self._add("published", time.time(), None, node, f"step {step}")
            case PublishFailed(reason=reason):
                self._add("failed", time.time(), None, node, reason)

    def took_over(self, node: int) -> None:
        """The controller is on `node` from now on."""
        self._add("took-over", time.time(), None, node, "the controllers of earlier terms are lost")

    def ordered(self, node: int, rank: int | None, order: object) -> None:
        """An order of the controller; the verdict ends the incident and writes the report."""
        if isinstance(order, Verdict):
            if not self._ended:
                self._ended = True
                self._add("verdict", time.time(), None, None, order.outcome)
                self._write(order)
            return
        if isinstance(order, Freeze) and order.stacks and not self._events:
            self._add(
                "fault-noticed", time.time(), None, None, f"nothing has moved for {self._still_s:.0f} s"
            )
        what = _ORDERS.get(type(order), "")
        if what:
            step = getattr(order, "step", None)
            self._add(what, time.time(), rank, node, "" if step is None else f"step {step}")

    def begin(self) -> None:
        """A new generation of workers: the timeline starts anew."""
        self._events, self._ended, self._noticed = [], False, set()

    def _add(self, what: str, at: float, rank: int | None, node: int | None, detail: str) -> None:
        who = f"rank {rank}" if rank is not None else f"node {node}" if node is not None else "job"
        _log.log(logging.DEBUG if what in _OF_EACH_RANK else logging.INFO, "%s: %s %s", who, what, detail)
        self._events.append({"t": at, "rank": rank, "node": node, "what": what, "detail": detail})

    def _write(self, verdict: Verdict) -> None:
        if verdict.outcome == "refused":
            return
        fault = next((event for event in self._events if event["what"] == "fault-noticed"), None)
        report = {
            "incident": verdict.incident,
            "fault": fault,
            "step": verdict.step,
            "cause_rank": verdict.cause_rank,
            "ranks": sorted({e["rank"] for e in self._events if e["rank"] is not None}),
            "events": sorted(self._events, key=lambda event: event["t"]),
            "verdict": {"nothing": "nothing-to-save"}.get(verdict.outcome, verdict.outcome),
            "reason": verdict.line,
        }
        self.next_incident = verdict.incident + 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"incident-{time.strftime('%Y%m%d-%H%M%S')}-{verdict.incident}.json"
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps(report, indent=1))
            scratch.replace(path)
        except OSError as error:
            print(f"[ttp] the incident report cannot be written: {error}", file=sys.stderr)
