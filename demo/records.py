"""The records of the runs: losses of each iteration and rank, bit for bit, and the incident report."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adaptor.protocol.records import unix


@dataclass(frozen=True)
class Step:
    """A finished iteration of one rank.

    Attributes:
        time: unix seconds at the end of the iteration.
        losses: hexadecimal, so that equal means equal bits.
        grad_norm: hexadecimal as well.
    """

    iteration: int
    rank: int
    restart: int
    time: float
    losses: dict[str, str]
    grad_norm: str | None

    @property
    def loss(self) -> float:
        return float.fromhex(next(iter(self.losses.values())))

    @property
    def bits(self) -> tuple[tuple[tuple[str, str], ...], str | None]:
        return tuple(sorted(self.losses.items())), self.grad_norm


class Follower:
    """Reads a growing record file; each call returns the steps added since the previous call."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._offset = 0

    def poll(self) -> list[Step]:
        try:
            with self._path.open("rb") as lines:
                lines.seek(self._offset)
                added = lines.read()
        except FileNotFoundError:
            return []
        complete_lines = added[: added.rfind(b"\n") + 1]  # without an unfinished line at the end
        self._offset += len(complete_lines)
        steps = (json.loads(line) for line in complete_lines.splitlines())
        return [
            Step(
                iteration=step["iteration"],
                rank=self._rank,
                restart=step["restart"],
                time=step["time"],
                losses=step["losses"],
                grad_norm=step["grad_norm"],
            )
            for step in steps
        ]


@dataclass(frozen=True)
class Comparison:
    """The comparison of a run with the reference.

    Attributes:
        compared: the number of records, one for each rank and iteration.
        difference: the first difference; None if every bit is equal.
    """

    compared: int
    difference: str | None

    @property
    def equal(self) -> bool:
        return self.difference is None


def compare(reference: list[Step], compared: list[Step], unrecorded: int | None = None) -> Comparison:
    """Compare losses and grad norms of two runs, bit for bit.

    Every rank and iteration of the reference must be in `compared`, with equal values each time. The step
    `unrecorded` may be missing: it was finished inside an incident that no rank survived to record the step.
    """
    expected = {(step.iteration, step.rank): step for step in reference}
    recorded: set[tuple[int, int]] = set()
    for step in sorted(compared, key=lambda step: (step.iteration, step.rank, step.restart)):
        key = (step.iteration, step.rank)
        place = f"iteration {step.iteration}, rank {step.rank}"
        if key not in expected:
            return Comparison(len(recorded), f"{place}: not in the reference run")
        if step.bits != expected[key].bits:
            return Comparison(len(recorded), f"{place}: {_difference(expected[key], step)}")
        recorded.add(key)
    for iteration, rank in sorted(set(expected) - recorded):
        if iteration != unrecorded:
            return Comparison(len(recorded), f"iteration {iteration}, rank {rank}: not recorded")
    if not recorded:
        return Comparison(0, "nothing was recorded")
    return Comparison(len(recorded), None)


def _difference(expected: Step, actual: Step) -> str:
    for name, value in expected.losses.items():
        if actual.losses.get(name) != value:
            return f"{name} {value} became {actual.losses.get(name)}"
    if actual.losses.keys() != expected.losses.keys():
        return f"losses {sorted(expected.losses)} became {sorted(actual.losses)}"
    return f"grad norm {expected.grad_norm} became {actual.grad_norm}"


@dataclass(frozen=True)
class Kill:
    """The SIGKILL that the demo sent, its time in unix seconds, and the pid of the waiting spare process."""

    rank: int
    pid: int
    time: float
    spare: int | None = None

    def step(self, steps: list[Step]) -> int:
        """Return the step that was in flight, according to the records of the killed process."""
        iterations = (step.iteration for step in steps if step.rank == self.rank and step.time <= self.time)
        return max(iterations, default=0) + 1


@dataclass(frozen=True)
class Incident:
    """The report that ttprun wrote; see `read_incident`."""

    saved_step: int  # the step from which the job went on, saved or not; 0: none
    verdict: str
    reason: str
    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def first(self, event_type: str) -> float | None:
        """Return the unix seconds of the first event of a type."""
        return min(
            (unix(event["time"]) for event in self.events if event["type"] == event_type), default=None
        )


def read_incident(folder: Path) -> Incident:
    """Read the only report in the folder. Raises ValueError for any other number of reports."""
    reports = sorted(folder.glob("*/incidents/*.json"))
    if len(reports) != 1:
        raise ValueError(f"{len(reports)} incident reports instead of one")
    report = json.loads(reports[0].read_text(encoding="utf-8"))
    return Incident(
        saved_step=report["step"] or 0,
        verdict=report["verdict"],
        reason=report["reason"],
        path=reports[0],
        events=sorted(report["events"], key=lambda event: str(event["time"])),
    )
