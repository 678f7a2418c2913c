"""The geometry of the page's charts: SVG in a box of 1000 x 100, which a browser stretches; no script."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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


# The number of columns of the chart.
_PARTS = 80
_TICKS = 4
# A younger job has no history.
_LEAST_S = 2.0
_COLOURS = {"training": "first", "startup": "load", "recovery": "write", "down": "other"}


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
