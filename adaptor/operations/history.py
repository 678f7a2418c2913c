"""Draws how a job has spent its time, from its beginning to its newest status."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import NamedTuple

from adaptor.operations import charts

# Parts into which the time is cut; each is a column of the chart.
_PARTS = 80
_TICKS = 4
# A job that is younger has no history.
_LEAST_S = 2.0
_COLOURS = {"training": "first", "startup": "load", "recovery": "write", "down": "other"}


class History(NamedTuple):
    """The columns of a chart, a curve over them, and the times below it.

    Attributes:
        total: the share of training since the beginning, at the end of each column
        ratios: its values
    """

    rects: list[charts.Rect]
    total: charts.ChartLine
    ratios: list[float]
    ticks: list[str]


def of_changes(changes: Sequence[tuple[float, str]], until: float) -> History | None:
    """Return the history of a job; None while it has none.

    Args:
        changes: when each state began, in Unix seconds, and which it was; in their order.
        until: the time to which the last one lasts.
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
            rectangle = charts.rect(colour, number, number + 1, _PARTS, low, min(1.0, high))
            low = high
            if rectangle is not None and part_of[state]:
                rects.append(rectangle)
        trained += part_of["training"]
        ratios.append(trained / (width * (number + 1)))
    middles = [number + 0.5 for number in range(_PARTS)]
    times = [began + (until - began) * number / _TICKS for number in range(_TICKS + 1)]
    return History(rects, charts.line(middles, ratios, 0.0, 1.0), ratios, _ticks(times))


def _ticks(times: Sequence[float]) -> list[str]:
    total = times[-1] - times[0]
    form = "%H:%M:%S" if total < 3600 else "%H:%M" if total < 86400 else "%m-%d %H:%M"
    return [datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime(form) for at in times]
