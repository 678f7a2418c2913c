"""Lays out an incident: lanes of the ranks over one scale, in words, and as a trace in Chrome's format.

A trace is for ui.perfetto.dev and chrome://tracing. It has a row for the parts of the incident and, by nodes,
a row for each rank: its orders, their durations, and its events.

Charts of pages are SVG in a box of 1000 x 100, which a browser stretches; without a script.
"""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from adaptor.protocol.records import Event, IncidentRecord, unix

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
# The number of columns, and of times, of the chart of a job's time.
_PARTS = 80
_TICKS = 4
# A younger job has no history.
_LEAST_S = 2.0
_COLOURS = {"training": "first", "startup": "load", "recovery": "write", "down": "other"}
Entry = dict[str, object]  # of a trace
# The row of the job, and of an agent, in a trace.
_JOB = 0
# By the order to a rank: the events that complete the order.
_TASKS = {
    "freeze": ("frozen",),
    "dump-ordered": ("written", "failed"),
    "regroup-ordered": ("joined", "failed"),
}
# By the part of an incident: the orders that begin the part.
_BEGIN = {
    "freeze": ("freeze",),
    "write": ("dump-ordered",),
    "regroup": ("replace", "regroup-ordered"),
}


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


def lanes_of(incident: IncidentRecord, fault_at: float, end_s: float) -> Lanes:
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


def _parts(incident: IncidentRecord, of_rank: Mapping[int | None, Sequence[Event]]) -> dict[int, str]:
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


WIDTH, HEIGHT = 1000.0, 100.0


class Rect(NamedTuple):
    """A rectangle of a chart, and the name of its colour."""

    kind: str
    x: str
    y: str
    width: str
    height: str


class ChartLine(NamedTuple):
    """A curve over steps or another count.

    Attributes:
        points: of an SVG polyline
        low, high: the values at the lower and the upper edge
        first, last: of the counted values
    """

    points: str
    low: float
    high: float
    first: float
    last: float


def rect(
    kind: str, begin: float, end: float, until: float, low: float = 0.0, high: float = 1.0
) -> Rect | None:
    """Return the rectangle from `begin` to `end` on a scale of 0 to `until`; None if it is outside of the
    scale.

    Args:
        kind: the name of its colour.
        begin: its beginning on the scale.
        end: its end.
        until: the end of the scale.
        low: its lower edge, from 0 to 1.
        high: its upper edge.
    """
    begin, end = max(0.0, begin), min(until, end)
    if end < begin or until <= 0 or high <= low:
        return None
    x = WIDTH * begin / until
    width = max(WIDTH * (end - begin) / until, 2.0)  # the shortest part is seen, too
    return Rect(
        kind,
        _number(min(x, WIDTH - width)),
        _number(HEIGHT * (1 - high)),
        _number(width),
        _number(HEIGHT * (high - low)),
    )


def row(seconds: Mapping[str, float], until: float = 0.0) -> list[Rect]:
    """Return rectangles one behind the other, on a scale to `until`; 0: as wide as the chart."""
    total = until or sum(seconds.values())
    rects, begin = [], 0.0
    for kind, took in seconds.items():
        rectangle = rect(kind, begin, begin + took, total) if took > 0 else None
        begin += took
        if rectangle is not None:
            rects.append(rectangle)
    return rects


def line(
    xs: Sequence[float], ys: Sequence[float], low: float | None = None, high: float | None = None
) -> ChartLine:
    """Return a curve; without `low` and `high` its values fill the chart.

    Args:
        xs: the counted values, ascending; at least one.
        ys: as many values.
        low: the value at the lower edge.
        high: the value at the upper edge.
    """
    low = min(ys) if low is None else low
    high = max(ys) if high is None else high
    wide = (xs[-1] - xs[0]) or 1.0
    tall = (high - low) or 1.0
    points = " ".join(
        f"{_number(WIDTH * (x - xs[0]) / wide)},{_number(HEIGHT * (1 - (y - low) / tall))}"
        for x, y in zip(xs, ys, strict=True)
    )
    return ChartLine(points, low, high, xs[0], xs[-1])


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


class History(NamedTuple):
    """The columns of a chart of a job's time, a curve over them, and the times below.

    Attributes:
        total: the share of training since the beginning, at the end of each column
        ratios: its values
    """

    rects: list[Rect]
    total: ChartLine
    ratios: list[float]
    ticks: list[str]


def history_of(changes: Sequence[tuple[float, str]], until: float) -> History | None:
    """Return the history of a job; None while the job is too young.

    Args:
        changes: the beginning of each state, in Unix seconds, and its name; in order.
        until: the end of the last state.
    """
    if not changes or until - changes[0][0] < _LEAST_S:
        return None
    began = changes[0][0]
    width = (until - began) / _PARTS
    spent = [dict.fromkeys(_COLOURS, 0.0) for _ in range(_PARTS)]
    ends = [*(at for at, _ in changes[1:]), until]
    for (begin, state), end in zip(changes, ends, strict=True):
        at, last = begin - began, min(end, until) - began
        while at < last and state in _COLOURS:
            part = min(int(at / width + 1e-9), _PARTS - 1)
            stop = last if part == _PARTS - 1 else min(last, (part + 1) * width)
            spent[part][state] += stop - at
            at = max(stop, (part + 1) * width) if stop < last else last
    rects, ratios, trained = [], [], 0.0
    for number, part_of in enumerate(spent):
        low = 0.0
        for state, colour in _COLOURS.items():
            high = low + part_of[state] / width
            rectangle = rect(colour, number, number + 1, _PARTS, low, min(1.0, high))
            low = high
            if rectangle is not None and part_of[state]:
                rects.append(rectangle)
        trained += part_of["training"]
        ratios.append(trained / (width * (number + 1)))
    middles = [number + 0.5 for number in range(_PARTS)]
    times = [began + (until - began) * number / _TICKS for number in range(_TICKS + 1)]
    return History(rects, line(middles, ratios, 0.0, 1.0), ratios, _ticks(times))


def _ticks(times: Sequence[float]) -> list[str]:
    total = times[-1] - times[0]
    form = "%H:%M:%S" if total < 3600 else "%H:%M" if total < 86400 else "%m-%d %H:%M"
    return [datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime(form) for at in times]


def chrome_trace(incident: IncidentRecord) -> dict[str, object]:
    """Return the trace of an incident; its times are microseconds from its first event."""
    times = [unix(incident.began), *(unix(event.time) for event in incident.events)]
    began = min(times)
    entries = [*_names(incident), *_phases(incident), *_tasks(incident), *map(_instant, incident.events)]
    for entry in entries:
        if isinstance(at := entry.get("ts"), float):
            entry["ts"] = round(1e6 * (at - began), 3)
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"job": incident.job, "incident": incident.id, "reason": incident.reason},
    }


def _place(event: Event) -> Entry:
    """Return the row of an event: the process is the node, the thread the rank."""
    return {
        "pid": _JOB if event.node is None else event.node + 1,
        "tid": _JOB if event.rank is None else event.rank + 1,
    }


def _names(incident: IncidentRecord) -> Iterator[Entry]:
    yield {"ph": "M", "name": "process_name", "pid": _JOB, "args": {"name": f"job {incident.job}"}}
    yield {"ph": "M", "name": "thread_name", "pid": _JOB, "tid": _JOB, "args": {"name": "parts"}}
    hosts = {event.node: event.host or "" for event in incident.events if event.node is not None}
    for node, host in sorted(hosts.items()):
        name = f"node {node} {host}".rstrip()
        yield {"ph": "M", "name": "process_name", "pid": node + 1, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_name", "pid": node + 1, "tid": _JOB, "args": {"name": "agent"}}
    ranks = {(event.node, event.rank) for event in incident.events if event.rank is not None}
    for on, rank in sorted(((-1 if on is None else on), rank or 0) for on, rank in ranks):
        blamed = ", blamed" if rank == incident.blamed else ""
        name = f"rank {rank}{blamed}"
        yield {"ph": "M", "name": "thread_name", "pid": on + 1, "tid": rank + 1, "args": {"name": name}}


def parts(incident: IncidentRecord) -> Iterator[tuple[str, float, float]]:
    """Yield the known parts of an incident: the field of `Phases`, its begin (Unix), its seconds."""
    phases = incident.phases
    frozen = _first(incident, ("freeze",))
    begin = {name: _first(incident, orders) for name, orders in _BEGIN.items()}
    begin["publish"] = max(
        (unix(event.time) for event in incident.events if event.type == "publish-ordered"), default=None
    )
    begin["detect"] = None if frozen is None or phases.detect is None else frozen - phases.detect
    at = unix(incident.ended)
    for name in ("restart", "load", "first_step"):
        begin[name] = at
        at += getattr(phases, name) or 0.0
    for name, since in begin.items():
        took = getattr(phases, name)
        if since is not None and took is not None:
            yield name, since, took


def _phases(incident: IncidentRecord) -> Iterator[Entry]:
    for name, since, took in parts(incident):
        yield _span(name.replace("_", " "), since, took, {"pid": _JOB, "tid": _JOB})


def _first(incident: IncidentRecord, types: tuple[str, ...]) -> float | None:
    return min((unix(event.time) for event in incident.events if event.type in types), default=None)


def _tasks(incident: IncidentRecord) -> Iterator[Entry]:
    """Yield the time of each rank from an order to its answer."""
    begun_events: dict[tuple[int, str], Event] = {}
    for event in sorted(incident.events, key=lambda event: unix(event.time)):
        if event.rank is None:
            continue
        if event.type in _TASKS:
            begun_events[event.rank, event.type] = event
            continue
        for order, answers in _TASKS.items():
            if event.type in answers and (begin := begun_events.pop((event.rank, order), None)) is not None:
                since = unix(begin.time)
                yield _span(order, since, unix(event.time) - since, _place(event))


def _span(name: str, since: float, took: float, place: Entry) -> Entry:
    return {"ph": "X", "name": name, "ts": since, "dur": round(1e6 * took, 3), **place}


def _instant(event: Event) -> Entry:
    about = {**event.data, **({"step": event.step} if event.step is not None else {})}
    return {"ph": "i", "s": "t", "name": event.type, "ts": unix(event.time), **_place(event), "args": about}
