"""Lays out an incident for its page: the actions of each rank, as lanes over one scale, and in words."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from adaptor.protocol.records import Event, Incident, unix

# The largest number of lanes; ranks with a part in the incident come first.
MOST_LANES = 10
# The largest number of words in a lane; the table of events has all.
_MOST_WORDS = 12
# By the order to a rank or an agent: the kind of the span, and the answers that end it.
_SPANS = {
    "freeze": ("stop", ("frozen", "died")),
    "dump-ordered": ("write", ("gathered", "written", "failed")),
    "publish-ordered": ("publish", ("published", "failed")),
    "regroup-ordered": ("regroup", ("joined", "failed")),
}
_WORDS = {
    "fault-noticed": "fault noticed",
    "freeze": "told to stop",
    "frozen": "stopped",
    "through-the-door": "let through to its next update",
    "replace": "told to start a new process",
    "prepare": "told to make the folder",
    "dump-ordered": "told to write",
    "gathered": "shards gathered",
    "publish-ordered": "told to name the checkpoint",
    "published": "checkpoint has its name",
    "started": "new process",
    "regroup-ordered": "told to meet again",
    "joined": "has met the others",
    "recovered": "training goes on",
    "end-ordered": "may end its script",
    "exit": "told to end",
}
# Events with a text of many lines, shown in the table of events only.
_UNTOLD = {"calls"}
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_INTERVALS = 5
# The units of scales: name, length, and the smallest end of a scale, in seconds; shorter scales have
# milliseconds.
_UNITS = (("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0))


class Span(NamedTuple):
    """A part of a lane: its kind, its begin and its end, in seconds from the fault."""

    kind: str
    begin: float
    end: float


class Lane(NamedTuple):
    """The actions of a rank, or of the controller and the agents together.

    Attributes:
        note: the rank's part in the incident, '' for none
        words: the events, with their seconds from the fault
    """

    name: str
    note: str
    spans: list[Span]
    words: list[tuple[str, float]]


class Lanes(NamedTuple):
    """The lanes of an incident; `left_out` ranks have none."""

    lanes: list[Lane]
    left_out: int


def words_of(event: Event) -> str:
    """Return the words for an event on the page."""
    return _WORDS.get(event.type, event.type.replace("-", " "))


def lanes_of(incident: Incident, fault_at: float, end_s: float) -> Lanes:
    """Return the lanes of an incident: the controller's, then the ranks', the blamed rank first.

    Args:
        incident: its file.
        fault_at: the zero of all seconds, in Unix seconds.
        end_s: the end of an open span, in seconds from the fault.
    """
    of_rank: dict[int | None, list[Event]] = defaultdict(list)
    for event in sorted(incident.events, key=lambda event: event.time):
        of_rank[event.rank].append(event)
    replaced = min(
        (unix(event.time) - fault_at for event in of_rank[None] if event.type == "replace"), default=None
    )
    parts = _parts(incident, of_rank)
    ranks = sorted((rank for rank in of_rank if rank is not None), key=lambda rank: _order(rank, parts))
    lanes = [_lane("controller, agents", "", of_rank[None], fault_at, end_s)]
    for rank in ranks[:MOST_LANES]:
        lane = _lane(f"rank {rank}", parts.get(rank, ""), of_rank[rank], fault_at, end_s)
        ended_at_once = rank == incident.blamed and incident.cause.kind in ("signal", "exit")
        spans = [*_gone(of_rank[rank], ended_at_once, replaced, fault_at, end_s), *lane.spans]
        if rank in incident.silent:
            spans = [span._replace(kind="silent") if span.kind == "stop" else span for span in spans]
        lanes.append(lane._replace(spans=spans))
    return Lanes(lanes, max(0, len(ranks) - MOST_LANES))


def _parts(incident: Incident, of_rank: Mapping[int | None, Sequence[Event]]) -> dict[int, str]:
    """Return the part of each rank in an incident; the first part that fits."""
    parts = {} if incident.blamed is None else {incident.blamed: "blamed"}
    parts |= {rank: "failed, too" for rank in incident.failed if rank not in parts}
    parts |= {rank: "did not answer" for rank in incident.silent if rank not in parts}
    for rank, events in of_rank.items():
        if rank is not None and rank not in parts and any(event.type == "dump-ordered" for event in events):
            parts[rank] = "writes"
    return parts


def _order(rank: int, parts: Mapping[int, str]) -> tuple[int, int]:
    order = ("blamed", "failed, too", "did not answer", "writes", "")
    return order.index(parts.get(rank, "")), rank


def _lane(name: str, note: str, events: Iterable[Event], fault_at: float, end_s: float) -> Lane:
    spans: list[Span] = []
    captions: list[tuple[str, float]] = []
    begun_by_kind: dict[str, float] = {}  # by the kind of a span: when it began
    for event in events:
        at = unix(event.time) - fault_at
        if event.type in _SPANS:
            begun_by_kind.setdefault(_SPANS[event.type][0], at)
        for kind, answers in _SPANS.values():
            if event.type in answers and kind in begun_by_kind:
                spans.append(Span(kind, begun_by_kind.pop(kind), at))
        word = words_of(event)
        if (
            event.type not in _UNTOLD
            and (not captions or captions[-1][0] != word)
            and len(captions) < _MOST_WORDS
        ):
            captions.append((word, at))
    spans += [Span(kind, begin, end_s) for kind, begin in begun_by_kind.items()]
    return Lane(name, note, spans, captions)


def _gone(
    events: Sequence[Event], ended_at_once: bool, replaced: float | None, fault_at: float, end_s: float
) -> list[Span]:
    """Return the spans in which a rank had no process, and in which a new process was starting."""
    died = [unix(event.time) - fault_at for event in events if event.type == "died"]
    started = [unix(event.time) - fault_at for event in events if event.type == "started"]
    if ended_at_once:
        died.insert(0, 0.0)
    if not died:
        return []
    back = min((at for at in started if at >= died[0]), default=end_s)
    if replaced is None or not started or replaced >= back:
        return [Span("gone", died[0], back)]
    begin = max(died[0], replaced)
    return [Span("gone", died[0], begin), Span("start", begin, back)]


def scale(until: float) -> tuple[float, list[float]]:
    """Return the end of a scale for `until` seconds, and its round numbers."""
    if until <= 0:
        return 1.0, [0.0, 1.0]
    _, unit_s = _unit(until)
    rough = until / unit_s / _INTERVALS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        (step_size * power for step_size in _STEPS if step_size * power >= rough * (1 - 1e-9)), 10 * power
    )
    step *= unit_s
    count = math.ceil(until / step - 1e-9)
    return count * step, [number * step for number in range(count + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Return the labels of a scale, all in the unit of its end."""
    unit, unit_s = _unit(ticks[-1])
    return [f"{at / unit_s:.3g} {unit}" if at else "0" for at in ticks]


def _unit(seconds: float) -> tuple[str, float]:
    """Return the unit of a scale of so many seconds: its name, and its length in seconds."""
    return next(((name, unit_s) for name, unit_s, least in _UNITS if seconds >= least), ("ms", 1e-3))
