"""Makes the file of an incident from its end and its timeline (docs/operations.md).

It runs in the thread that writes the file, behind the decision.
"""

from __future__ import annotations

import contextlib
import platform
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, cast, get_args

import msgspec

from adaptor.controller import missing_collectives
from adaptor.controller.failures import SIGNAL_BASE
from adaptor.operations import notices, records
from adaptor.operations.records import Cause, CauseKind, Event, Incident, Phases, Versions
from adaptor.protocol import collectives
from adaptor.protocol.messages import (
    Dump,
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

NOTICED = "fault-noticed"
# Sections of docs/runbook.md.
_RUNBOOK = "docs/runbook.md"


class Happened(NamedTuple):
    """Something that happened, `at` Unix seconds; None where rank, node or step do not apply."""

    at: float
    what: str
    rank: int | None
    node: int | None
    detail: str
    step: int | None


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An order to one of many ranks, or its answer, at `at` Unix seconds; `happened` has the words."""

    at: float
    node: int
    rank: int
    message: Message


ORDERS: dict[type, str] = {
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


def happened(one: Happened | Seen) -> Happened:
    """Return `one` in words."""
    if isinstance(one, Happened):
        return one
    if isinstance(one.message, Frozen):
        board = one.message.board
        return Happened(
            one.at, "frozen", one.rank, one.node, f"{board.phase_name} after step {board.finished}", None
        )
    step = getattr(one.message, "step", None)
    return Happened(one.at, ORDERS[type(one.message)], one.rank, one.node, "", step)


@dataclass
class Timeline:
    """The events of an incident, and what is known of the job that it happened in.

    Attributes:
        silent_s: for a hang: how long nothing had moved
        checkpoint: the folder that was published, and `size` of its files in bytes; None where none was
        nodes: the node of each rank that has said hello; `hosts` of nodes, `pids` of ranks
    """

    job: str
    generation: int
    happened: Sequence[Happened | Seen]
    silent_s: float = 0.0
    checkpoint: str | None = None
    size: int | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)
    pids: Mapping[int, int] = field(default_factory=dict)

    def event(self, one: Happened, incident: int | None, more: Mapping[str, str] | None = None) -> Event:
        """Return the record of a line of events.jsonl.

        Args:
            one: what happened.
            incident: the number of the incident that was open; None between incidents.
            more: what its data has besides the detail.
        """
        node = one.node if one.node is not None or one.rank is None else self.nodes.get(one.rank)
        return Event(
            time=records.utc(one.at),
            job=self.job,
            generation=self.generation,
            incident=incident,
            type=one.what,
            node=node,
            host=self.hosts.get(node) if node is not None else None,
            rank=one.rank,
            pid=self.pids.get(one.rank) if one.rank is not None else None,
            step=one.step,
            data={**({"detail": one.detail} if one.detail else {}), **(more or {})},
        )


def incident_of(end: Verdict | Recovered, timeline: Timeline, name: str, ended: float) -> Incident:
    """Return the file of the incident that has ended with `end`.

    Args:
        end: the verdict, or the end of an online recovery.
        timeline: what happened.
        name: the id of the file.
        ended: when the verdict was given, in Unix seconds.
    """
    events = sorted(map(happened, timeline.happened), key=lambda one: one.at)
    begun = [one for one in events if one.what == "collectives"]
    events = [one for one in events if one.what != "collectives"]
    fault = end.fault
    blamed = next(iter(fault.ranks), -1) if isinstance(end, Recovered) else end.cause_rank
    noticed = _noticed(blamed, events)
    exit_code, stop, newest, lost = None, "", None, None
    if isinstance(end, Recovered):
        verdict, newest, lost = "recovered", end.step, 0
        action = f"training went on with step {end.step + 1}"
    else:
        verdict, stop, exit_code = end.outcome, end.stop, end.exit_code
        newest = end.newest if end.newest >= 0 else None
        if verdict == "saved":
            lost = max(0, end.newest - end.step)
        action = f"the job ends: {stop}" if stop else _next(end, timeline)
    step = end.step if end.step >= 0 else None
    return Incident(
        id=name,
        job=timeline.job,
        generation=timeline.generation,
        incident=end.incident,
        began=records.utc(noticed.at if noticed is not None else ended),
        ended=records.utc(ended),
        cause=_cause(fault, exit_code),
        reason=end.line,
        blamed=blamed if blamed >= 0 else None,
        node=_node(blamed, noticed, timeline),
        host=fault.host or None,
        pid=fault.pid or None,
        failed=list(fault.ranks),
        silent=_silent(events),
        verdict=verdict,  # type: ignore[arg-type]  # `refused` has no file
        step=step,
        newest_step=newest,
        steps_lost=lost,
        phases=_phases(events, noticed, timeline.silent_s if fault.kind == "hang" else 0.0),
        checkpoint=timeline.checkpoint,
        bytes=timeline.size,
        exit_code=exit_code,
        next_action=action,
        not_started_again=stop,
        runbook=f"{_RUNBOOK}#{_kind(fault)}",
        collectives=_missing(begun, _silent(events)),
        versions=_versions(),
        ranks=sorted({one.rank for one in events if one.rank is not None}),
        events=[timeline.event(one, end.incident) for one in events],
    )


def _next(end: Verdict, timeline: Timeline) -> str:
    """Return what comes after a verdict, as far as the verdict tells; the agent knows more later."""
    if not end.is_requested:
        return "the workers are started again, if a restart is left"
    if len(timeline.hosts) > 1:
        return f"ttprun on {end.fault.host} ends, as it was told; the job goes on if enough nodes are left"
    return "the job ends, as ttprun was told"


def _missing(happened: Sequence[Happened], silent: Sequence[int]) -> list[str]:
    """Return which rank misses which collective; it is also written beside the stacks."""
    files, of_ranks = [], {}
    for one in happened:
        if one.rank is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                path, of_ranks[one.rank] = collectives.decode(one.detail)
                files.append(path)
    found = missing_collectives.missing(of_ranks, silent)
    if found:
        with contextlib.suppress(OSError):  # the file of the incident has it, too
            place = Path(files[0]).with_name("collectives.txt")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("".join(f"{line}\n" for line in found))
    return found


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
    )


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _noticed(blamed: int, happened: Sequence[Happened]) -> Happened | None:
    """Return the notice of the fault of the rank `blamed`; survivors may have raised before it."""
    noticed = [one for one in happened if one.what == NOTICED]
    return next((one for one in noticed if one.rank == blamed), noticed[0] if noticed else None)


def _node(blamed: int, noticed: Happened | None, timeline: Timeline) -> int | None:
    if blamed in timeline.nodes:
        return timeline.nodes[blamed]
    return noticed.node if noticed is not None else None


def _silent(happened: Sequence[Happened]) -> list[int]:
    """Return the ranks that were told to stop and neither answered nor ended, in order."""
    told = {one.rank for one in happened if one.what == "freeze" and one.rank is not None}
    answered = {one.rank for one in happened if one.what in ("frozen", "died", NOTICED)}
    return sorted(told - answered)


def _phases(happened: Sequence[Happened], noticed: Happened | None, silent_s: float) -> Phases:
    def first(*what: str) -> float | None:
        return min((one.at for one in happened if one.what in what), default=None)

    def last(*what: str) -> float | None:
        return max((one.at for one in happened if one.what in what), default=None)

    ordered = first("freeze")
    detect = silent_s or _between(noticed.at if noticed is not None else None, ordered)
    return Phases(
        detect=detect,
        freeze=_between(ordered, last("frozen")),
        write=_between(first("dump-ordered"), last("written")),
        publish=_between(last("publish-ordered"), last("published")),
        regroup=_between(first("replace", "regroup-ordered"), first("recovered")),
    )


def _between(begin: float | None, end: float | None) -> float | None:
    """Return the seconds from `begin` to `end`; clocks of two nodes may disagree, and it is never below 0."""
    return None if begin is None or end is None else max(0.0, end - begin)


class GoneOn(NamedTuple):
    """The times at which a job went on after an incident, in Unix seconds.

    Attributes:
        ended: when the verdict was given
        started: when the last worker had been started again; 0.0 where all but failed ones lived on
        trained: when the last rank began to train
        finished: when the first step was finished
        origin: the step from which it went on
    """

    ended: float
    started: float
    trained: float
    finished: float
    origin: int


def with_going_on(incident: Incident, after: GoneOn) -> Incident:
    """Return the file of `incident` with how the job went on."""
    again = bool(after.started)
    phases = msgspec.structs.replace(
        incident.phases,
        restart=_between(after.ended, after.started) if again else None,
        load=_between(after.started, after.trained) if again else None,
        first_step=_between(after.trained, after.finished),
    )
    lost = incident.steps_lost
    if incident.newest_step is not None:
        lost = max(0, incident.newest_step - after.origin)
    return msgspec.structs.replace(incident, phases=phases, steps_lost=lost)


class IncidentFile:
    """A file that is written again when more is known; the thread that writes it makes it.

    Args:
        make: makes the file with the verdict.
        ended: when that was given, in Unix seconds.
        generation: in which the incident was.
        online: whether training went on in the same generation.

    Attributes:
        actions: what was done after its verdict
        gone_on: how the job went on, as soon as it has
    """

    def __init__(self, make: Callable[[], Incident], ended: float, generation: int, *, online: bool) -> None:
        self._make = make
        self._made: Incident | None = None
        self._generation = generation
        self._online = online
        self.ended = ended
        self.actions: list[str] = []
        self.gone_on: GoneOn | None = None

    def is_over(self, generation: int) -> bool:
        """Return whether workers of `generation` train after the incident."""
        return self._online or generation > self._generation

    def notice(self, at: float, gone_on: GoneOn | None) -> records.Notice:
        """Return the notice of what is known; it is made in the threads of targets, and changes nothing here.

        Args:
            at: when that was, in Unix seconds.
            gone_on: how the job went on, if that was known then.
        """
        made = self._make()
        if self.actions:
            made.next_action = self.actions[-1]
        if gone_on is not None:
            made = with_going_on(made, gone_on)
        return notices.of_incident(made, records.utc(at), "incident" if gone_on is None else "resumed")

    def again(self) -> Incident:
        """Return what the file has now."""
        if self._made is None:
            self._made = self._make()
        if self.actions:
            self._made.next_action = self.actions[-1]
        if self.gone_on is not None:
            self._made = with_going_on(self._made, self.gone_on)
        return self._made
