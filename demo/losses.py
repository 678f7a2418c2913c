"""The losses of the demo's runs: one curve, and how far the others are from it."""

from __future__ import annotations

from typing import NamedTuple

from adaptor.operations import timeline
from demo.records import Step


class Difference(NamedTuple):
    """How the losses of a run differ from the reference's.

    line     the differences, over the iterations that both have
    largest  the largest one, without its sign
    differ   the iterations in which they differ, of `compared`
    """

    title: str
    line: timeline.ChartLine
    largest: float
    differ: int
    compared: int


def losses(steps: list[Step]) -> tuple[list[int], list[float]]:
    """Return iterations, and the loss of each, from the lowest rank that recorded it last."""
    kept: dict[int, Step] = {}
    for step in sorted(steps, key=lambda step: (step.restart, -step.rank)):
        kept[step.iteration] = step
    return sorted(kept), [kept[iteration].loss for iteration in sorted(kept)]


def curve(steps: list[Step]) -> timeline.ChartLine:
    """Return the loss curve of a run. It must have recorded a step."""
    return timeline.line(*losses(steps))


def difference(title: str, reference: list[Step], steps: list[Step]) -> Difference:
    """Compare the losses of a run with the reference's. Both must have recorded one iteration at least."""
    expected = dict(zip(*losses(reference), strict=True))
    found = {at: loss - expected[at] for at, loss in zip(*losses(steps), strict=True) if at in expected}
    largest = max(map(abs, found.values()))
    edge = largest or 1.0  # where all are equal, the curve is the line in the middle
    return Difference(
        title=title,
        line=timeline.line(list(found), list(found.values()), -edge, edge),
        largest=largest,
        differ=sum(value != 0 for value in found.values()),
        compared=len(found),
    )
