"""The cells of the whole cross product: what is trained, what is struck, and what may be saved then."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from tests.faults.fault import Fault
from tests.faults.harness import DP2, DP3, Layout
from tests.faults.layouts import ALONE, LAYOUTS, VARIED, replicas

# A fault before any rank can be at the door of its step, and one after.
MOMENTS = {
    "early": ("data", "forward", "backward", "reduction"),
    "late": ("norm", "door-before", "door-after", "copy", "update", "gather", "between"),
}
# Some ranks may be at the door, others not yet.
_UNDECIDED = ("norm", "door-before")
# An exception keeps the state readable, unless it is inside the update and there is no copy.
_READABLE = ("norm", "between")
STEPS = (6, 7)


@dataclass(frozen=True)
class Format:
    """How a job is told to save.

    arguments  of the script
    interval   between its own saves
    """

    arguments: tuple[str, ...] = ()
    interval: int = 1000


FORMATS = {
    "torch": Format(),
    "torch_dist": Format(("--ckpt-format", "torch_dist"), 4),
    "torch_dist, async": Format(("--ckpt-format", "torch_dist", "--async-save"), 4),
}


@dataclass(frozen=True)
class Cell:
    """One combination, and the moment of its fault.

    family  the name of its layout, without precision, replica and format
    layout  with these: names the run of the unmodified framework that belongs to it
    copies  whether there are local copies, in place of the barrier
    """

    family: str
    layout: Layout
    replica: str
    copies: bool
    format: str
    moment: str

    @property
    def name(self) -> str:
        door = "local copy" if self.copies else "barrier"
        return " / ".join((self.family, self.layout.precision, self.replica, door, self.format, self.moment))

    @property
    def alone(self) -> bool:
        """Whether the death of a process would lose what no other has."""
        return self.family in ALONE

    def phases(self) -> tuple[str, ...]:
        """Those of its moment that its processes reach, and that can be survived."""
        overlapped = "--overlap-param-gather" in self.layout.extra
        # Overlapped, parameters are gathered in the next step; whole, they never are.
        gathers = self.layout.distributed_optimizer and not overlapped
        return tuple(
            phase
            for phase in MOMENTS[self.moment]
            if (self.copies or phase != "copy")
            and (gathers or phase != "gather")
            and (not self.alone or self.copies or self.moment == "early" or phase in _READABLE)
        )

    def fault(self, seed: int, skipped: Collection[int]) -> tuple[Fault, set[int]]:
        """What strikes, and the steps that may be saved then.

        Args:
            seed: of the choice of step, rank and phase.
            skipped: steps that the unmodified framework skips: some phases do not come there.
        """
        source = random.Random(f"{seed} {self.name}")
        step = source.choice([step for step in STEPS if step not in skipped])
        rank = source.randrange(self.layout.processes)
        phase = source.choice(self.phases())
        fault = Fault(rank=rank, step=step, phase=phase, kind="exception" if self.alone else "sigkill")
        if self.moment == "early":
            return fault, {step - 1}
        return fault, {step - 1, step} if self.copies or phase in _UNDECIDED else {step}


def cells(faults: int) -> list[Cell]:
    """All of them, in turns: each turn has one of every layout, until it has no more.

    Args:
        faults: 1 for one fault in each combination, early or late in turn; 2 for both.
    """
    queues = [_of(layout, number, faults) for number, layout in enumerate(LAYOUTS)]
    return [cell for turn in itertools.zip_longest(*queues) for cell in turn if cell is not None]


def _of(layout: Layout, number: int, faults: int) -> list[Cell]:
    """Those of a layout, shuffled, so that the first turns have some of all."""
    moments = list(MOMENTS)
    found = []
    for turn, (precision, (replica, cut), copies, kind) in enumerate(_combinations(layout)):
        for moment in (moments + moments)[(turn + number) % 2 :][:faults]:
            own = _saving(_in(cut, layout, precision), kind)
            found.append(Cell(layout.name, own, replica, copies, kind, moment))
    random.Random(layout.name).shuffle(found)
    return found


def _combinations(layout: Layout) -> Iterator[tuple[str, tuple[str, Layout], bool, str]]:
    """Precision, replica, local copies and format."""
    yield from itertools.product(("bf16",), replicas(layout), (False, True), ("torch",))
    if layout in VARIED:
        experts_apart = "--expert-model-parallel-size" in layout.extra
        precisions = ("fp32",) if experts_apart else ("fp16", "fp32")  # the framework's rule
        yield from itertools.product(precisions, replicas(layout), (False, True), ("torch",))
        yield from itertools.product(("bf16",), replicas(layout), (False,), ("torch_dist",))
    if layout in (DP2, DP3):
        yield from itertools.product(("bf16",), replicas(layout), (False,), ("torch_dist, async",))


def _in(cut: Layout, layout: Layout, precision: str) -> Layout:
    """A layout that asks for a replica, in another precision than its own."""
    if precision == cut.precision:
        return cut
    return replace(cut, name=cut.name.replace(layout.name, f"{layout.name}-{precision}"), precision=precision)


def _saving(layout: Layout, kind: str) -> Layout:
    """A layout that saves in another format."""
    if kind == "torch":
        return layout
    name = f"{layout.name}-{kind.replace(', ', '-').replace('_', '-')}"
    return replace(layout, name=name, extra=(*layout.extra, *FORMATS[kind].arguments))
