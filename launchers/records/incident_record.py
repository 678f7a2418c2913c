"""Makes the record of an incident from its end and its timeline; completes the record when more is known.

docs/operations.md describes the record. Everything runs in the thread that writes the file, after the
decision.
"""

from __future__ import annotations

import contextlib
import math
import platform
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, cast, get_args

import msgspec

from adaptor.controller.failures import SIGNAL_BASE, missing_collectives
from adaptor.launchers.records.notices import notice_of_incident
from adaptor.protocol import collectives, records
from adaptor.protocol.messages import (
    Dump,
    EndScript,
    Exit,
    Fault,
    Find,
    Freeze,
    Frozen,
    Message,
    Prepare,
    Publish,
    Recovered,
    Regroup,
    Rename,
    Replace,
    Verdict,
)
from adaptor.protocol.records import Cause, CauseKind, Event, IncidentRecord, Phases, Versions

NOTICED = "fault-noticed"
# Sections of docs/runbook.md.
_RUNBOOK = "docs/runbook.md"


class Happened(NamedTuple):
    """An event at `at` Unix seconds; None for fields that do not apply."""

    at: float
    what: str
    rank: int | None
    node: int | None
    detail: str
    step: int | None
    pid: int | None  # of the rank's process at that time


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An order to one of many ranks, or the answer, at `at` Unix seconds; `happened` formats it."""

    at: float
    node: int
    rank: int
    message: Message
    pid: int | None


ORDERS: dict[type, str] = {
    Freeze: "freeze",
    Replace: "replace",
    Regroup: "regroup-ordered",
    Dump: "dump-ordered",
    Prepare: "prepare",
    Publish: "publish-ordered",
    Find: "find-ordered",
    Rename: "rename-ordered",
    EndScript: "end-ordered",
    Exit: "exit",
}


def happened(event: Happened | Seen) -> Happened:
    """Return `event` in words."""
    if isinstance(event, Happened):
        return event
    if isinstance(event.message, Frozen):
        board = event.message.board
        detail = f"{board.phase_name} after step {board.finished}"
        return Happened(event.at, "frozen", event.rank, event.node, detail, None, event.pid)
    step = getattr(event.message, "step", None)
    return Happened(event.at, ORDERS[type(event.message)], event.rank, event.node, "", step, event.pid)


@dataclass
class Timeline:
    """The events of an incident, and facts about the job.

    Attributes:
        silent_s: for a hang: the seconds without progress
        checkpoint: the published folder, and `size` of its files in bytes; None without a checkpoint
        nodes: the node of each rank that has said hello; `hosts` of nodes
        newest: the newest finished step of the generation; -1: none
        again: returns the first step of another start; None if unknown. The disk may take seconds
        unprotected: whether a rank has trained steps that could not be saved
    """

    job: str
    generation: int
    happened: Sequence[Happened | Seen]
    silent_s: float = 0.0
    checkpoint: str | None = None
    size: int | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    newest: int = -1
    again: Callable[[], int | None] = lambda: None
    unprotected: bool = False

    def event(
        self, happened_event: Happened, incident: int | None, further_data: Mapping[str, str] | None = None
    ) -> Event:
        """Return the record of a line of events.jsonl.

        Args:
            happened_event: the event.
            incident: the number of the open incident; None between incidents.
            further_data: added to the detail.
        """
        node = happened_event.node
        if node is None and happened_event.rank is not None:
            node = self.nodes.get(happened_event.rank)
        return Event(
            time=records.utc(happened_event.at),
            job=self.job,
            generation=self.generation,
            incident=incident,
            type=happened_event.what,
            node=node,
            host=self.hosts.get(node) if node is not None else None,
            rank=happened_event.rank,
            pid=happened_event.pid,
            step=happened_event.step,
            data={
                **({"detail": happened_event.detail} if happened_event.detail else {}),
                **(further_data or {}),
            },
        )


def incident_of(end: Verdict | Recovered, timeline: Timeline, name: str, ended_at: float) -> IncidentRecord:
    """Return the record of the incident that ended with `end`.

    Args:
        end: the verdict, or the end of an online recovery.
        ended_at: the time of the verdict, in Unix seconds.
    """
    events = sorted(map(happened, timeline.happened), key=lambda event: event.at)
    collectives_events = [event for event in events if event.what == "collectives"]
    events = [event for event in events if event.what != "collectives"]
    fault = end.fault
    blamed = next(iter(fault.ranks), -1) if isinstance(end, Recovered) else end.cause_rank
    is_hang = fault.kind == "hang"
    # In a hang the notice of a blamed rank is its end, after others have waited in vain.
    noticed = _noticed(-1 if is_hang else blamed, events)
    silent = _silent(events, is_hang=is_hang)
    exit_code, stop, newest, lost = None, "", None, None
    if isinstance(end, Recovered):
        verdict, newest, lost = "recovered", end.step + end.made_again, end.made_again
        action = f"training went on after step {end.step}"
    else:
        verdict, stop, exit_code = end.outcome, end.stop, end.exit_code
        newest = _newest(end, timeline)
        lost = _lost(end, newest, timeline)
        action = f"the job ends: {stop}" if stop else _next(end, timeline)
    step = end.step if end.step >= 0 else None
    return IncidentRecord(
        id=name,
        job=timeline.job,
        generation=timeline.generation,
        incident=end.incident,
        began=records.utc(noticed.at if noticed is not None else ended_at),
        ended=records.utc(ended_at),
        cause=_cause(fault, exit_code),
        reason=end.line,
        blamed=blamed if blamed >= 0 else None,
        node=_node(blamed, noticed, timeline),
        host=fault.host or None,
        pid=fault.pid or None,
        failed=list(fault.ranks),
        silent=silent,
        verdict=verdict,  # type: ignore[arg-type]  # `refused` has no file
        step=step,
        newest_step=newest,
        steps_lost=lost,
        phases=_phases(events, noticed, timeline.silent_s if is_hang else 0.0),
        checkpoint=timeline.checkpoint,
        bytes=timeline.size,
        exit_code=exit_code,
        next_action=action,
        not_started_again=stop,
        runbook=f"{_RUNBOOK}#{_kind(fault)}",
        collectives=_missing(collectives_events, silent),
        versions=_versions(),
        ranks=sorted({event.rank for event in events if event.rank is not None}),
        events=[timeline.event(event, end.incident) for event in events],
    )


def _newest(end: Verdict, timeline: Timeline) -> int | None:
    """Return the newest finished step, from the boards if the controller has failed."""
    newest = end.newest
    if end.outcome == "lost":
        newest = max(newest, timeline.newest)
    return newest if newest >= 0 else None


def _lost(end: Verdict, newest: int | None, timeline: Timeline) -> int | None:
    """Return the number of finished steps that are not saved; None if unknown."""
    if end.outcome == "nothing":  # no step has finished, or nobody has counted steps
        return None if timeline.unprotected else 0
    if newest is None:
        return None
    resumed_step = end.step if end.outcome == "saved" else timeline.again()
    return None if resumed_step is None else max(0, newest - resumed_step)


def _next(end: Verdict, timeline: Timeline) -> str:
    """Return the action after a verdict, as far as the verdict tells; the agent knows more later."""
    if not end.is_requested:
        return "the workers are started again, if a restart is left"
    if len(timeline.hosts) > 1:
        return f"ttprun on {end.fault.host} ends, as it was told; the job goes on if enough nodes are left"
    return "the job ends, as ttprun was told"


def _missing(happened: Sequence[Happened], silent: Sequence[int]) -> list[str]:
    """Return the lines about missing collectives of ranks; they are also written beside the stacks."""
    files, of_ranks = [], {}
    for event in happened:
        if event.rank is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                path, of_ranks[event.rank] = collectives.decode(event.detail)
                files.append(path)
    missing_lines = missing_collectives(of_ranks, silent)
    if missing_lines:
        with contextlib.suppress(OSError):  # the incident's file has the lines, too
            place = Path(files[0]).with_name("collectives.txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("".join(f"{line}\n" for line in missing_lines))
    return missing_lines


def _versions() -> Versions:
    return Versions(
        adaptor=metadata.version("ttp-adaptor"),
        torch=metadata.version("torch"),
        python=platform.python_version(),
    )


def _kind(fault: Fault) -> CauseKind:
    return cast("CauseKind", fault.kind) if fault.kind in get_args(CauseKind) else "unknown"


def _cause(fault: Fault, exit_code: int | None) -> Cause:
    kind = _kind(fault)
    name = None
    if kind == "signal" and fault.status is not None:
        name = _signal(-fault.status)
    elif kind == "told-to-end" and exit_code is not None:
        name = _signal(exit_code - SIGNAL_BASE)
    return Cause(
        kind=kind,
        signal=name,
        exit_code=fault.status if kind == "exit" else None,
        exception=fault.key if kind == "exception" else None,
        out_of_memory=fault.why or None,
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _noticed(blamed: int, happened: Sequence[Happened]) -> Happened | None:
    """Return the notice of the fault of the rank `blamed`; survivors may have raised earlier."""
    noticed = [event for event in happened if event.what == NOTICED]
    return next((event for event in noticed if event.rank == blamed), noticed[0] if noticed else None)


def _node(blamed: int, noticed: Happened | None, timeline: Timeline) -> int | None:
    if blamed in timeline.nodes:
        return timeline.nodes[blamed]
    return noticed.node if noticed is not None else None


def _silent(happened: Sequence[Happened], *, is_hang: bool) -> list[int]:
    """Return the ranks that were told to stop and neither answered nor ended, in order.

    In a hang, processes that end after the order of new processes were ended for their silence.
    """
    ordered = min((event.at for event in happened if event.what == "replace"), default=math.inf)
    given_up = ordered if is_hang else math.inf
    frozen_ranks = {event.rank for event in happened if event.what == "freeze" and event.rank is not None}
    ended_ranks = {
        event.rank for event in happened if event.what in ("died", NOTICED) and event.at < given_up
    }
    return sorted(frozen_ranks - ended_ranks - {event.rank for event in happened if event.what == "frozen"})


def _phases(happened: Sequence[Happened], noticed: Happened | None, silent_s: float) -> Phases:
    def first(*event_names: str) -> float | None:
        return min((event.at for event in happened if event.what in event_names), default=None)

    def last(*event_names: str) -> float | None:
        return max((event.at for event in happened if event.what in event_names), default=None)

    ordered = first("freeze")
    detect = silent_s or seconds_between(noticed.at if noticed is not None else None, ordered)
    return Phases(
        detect=detect,
        freeze=seconds_between(ordered, last("frozen")),
        write=seconds_between(first("dump-ordered"), last("written")),
        publish=seconds_between(last("publish-ordered"), last("published")),
        regroup=seconds_between(first("replace", "regroup-ordered"), first("recovered")),
    )


def seconds_between(begin: float | None, end: float | None) -> float | None:
    """Return the seconds from `begin` to `end`, at least 0, because clocks of two nodes may disagree."""
    return None if begin is None or end is None else max(0.0, end - begin)


class GoneOn(NamedTuple):
    """The times at which a job went on after an incident, in Unix seconds.

    Attributes:
        started: the last worker had been restarted; 0.0 if only failed workers were replaced
        trained: the last rank began to train
        finished: the first step was finished
        origin: the step from which the job went on
    """

    ended: float
    started: float
    trained: float
    finished: float
    origin: int


def with_going_on(incident: IncidentRecord, gone_on: GoneOn) -> IncidentRecord:
    """Return the record of `incident` with the way the job went on."""
    is_repeated = bool(gone_on.started)
    phases = msgspec.structs.replace(
        incident.phases,
        restart=seconds_between(gone_on.ended, gone_on.started) if is_repeated else None,
        load=seconds_between(gone_on.started, gone_on.trained) if is_repeated else None,
        first_step=seconds_between(gone_on.trained, gone_on.finished),
    )
    lost = incident.steps_lost
    if incident.newest_step is not None:
        lost = max(0, incident.newest_step - gone_on.origin)
    return msgspec.structs.replace(incident, phases=phases, steps_lost=lost)


class IncidentFile:
    """The file of an incident, which the writer's thread writes again when more is known.

    Args:
        make: makes the record with the verdict.
        ended_at: the time of the verdict, in Unix seconds.
        online: whether training went on in the same generation.

    Attributes:
        actions: the actions after the verdict
        gone_on: how the job went on; None before
    """

    def __init__(
        self, make: Callable[[], IncidentRecord], ended_at: float, generation: int, *, online: bool
    ) -> None:
        self._make = make
        self._made: IncidentRecord | None = None
        self._generation = generation
        self._online = online
        self.ended = ended_at
        self.actions: list[str] = []
        self.gone_on: GoneOn | None = None

    def is_over(self, generation: int) -> bool:
        """Return whether workers of `generation` train after the incident."""
        return self._online or generation > self._generation

    def notice(self, at: float, gone_on: GoneOn | None) -> records.Notice:
        """Return the notice of the known facts; called in the threads of targets, changes nothing.

        Args:
            at: the time of the notice, in Unix seconds.
            gone_on: how the job went on, if known at that time.
        """
        incident = self._make()
        if self.actions:
            incident.next_action = self.actions[-1]
        if gone_on is not None:
            incident = with_going_on(incident, gone_on)
        return notice_of_incident(incident, records.utc(at), "incident" if gone_on is None else "resumed")

    def again(self) -> IncidentRecord:
        """Return the current content of the file."""
        if self._made is None:
            self._made = self._make()
        if self.actions:
            self._made.next_action = self.actions[-1]
        if self.gone_on is not None:
            self._made = with_going_on(self._made, self.gone_on)
        return self._made
