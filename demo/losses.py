"""The losses of the demo's runs: the curve of one run, and the differences of the others."""

from __future__ import annotations

from typing import NamedTuple

from adaptor.operations import timeline
from demo.records import Step


class Difference(NamedTuple):
    """The difference of a run's losses from the reference.

    Attributes:
        line: the differences over the common iterations.
        largest: the largest absolute difference.
        differ: the number of iterations that differ, of `compared`.
    """

    title: str
    line: timeline.ChartLine
    largest: float
    differ: int
    compared: int


def losses(steps: list[Step]) -> tuple[list[int], list[float]]:
    """Return the iterations with their losses, from the last record of the lowest rank."""
    kept: dict[int, Step] = {}
    for step in sorted(steps, key=lambda step: (step.restart, -step.rank)):
        kept[step.iteration] = step
    return sorted(kept), [kept[iteration].loss for iteration in sorted(kept)]


def curve(steps: list[Step]) -> timeline.ChartLine:
    """Return the loss curve of a run with at least one recorded step."""
    return timeline.line(*losses(steps))


def difference(title: str, reference: list[Step], steps: list[Step]) -> Difference:
    """Compare the losses of two runs that have each recorded at least one iteration."""
    expected = dict(zip(*losses(reference), strict=True))
    losses_by_step = zip(*losses(steps), strict=True)
    gaps = {step: loss - expected[step] for step, loss in losses_by_step if step in expected}
    largest = max(map(abs, gaps.values()))
    edge = largest or 1.0  # if all are equal, the curve is a line in the middle
    return Difference(
        title=title,
        line=timeline.line(list(gaps), list(gaps.values()), -edge, edge),
        largest=largest,
        differ=sum(gap != 0 for gap in gaps.values()),
        compared=len(gaps),
    )
