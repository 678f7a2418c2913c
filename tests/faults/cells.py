"""The cells of the full matrix: a layout, a fault, and the steps to which last words may belong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from tests.faults.fault import Fault
from tests.faults.harness import DP2, DP3, Layout
from tests.faults.layouts import ALONE, LAYOUTS, VARIED, replicas

# Phases before any rank can be at the door of its step, and phases after that.
MOMENTS = {
    "early": ("data", "forward", "backward", "reduction"),
    "late": ("norm", "door-before", "door-after", "copy", "update", "gather", "between"),
}
# Phases in which some ranks may be at the door, others not yet.
_UNDECIDED = ("norm", "door-before")
# Late phases in which a lone rank's exception can be survived: elsewhere the update may be half done.
_READABLE = ("norm", "between")
STEPS = (6, 7)


@dataclass(frozen=True)
class Format:
    """Options with which a job saves.

    Attributes:
        arguments: of the script.
        interval: steps between regular saves.
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
    """A combination of the matrix, with the moment of the fault.

    Attributes:
        family: the name of the layout, without precision, replica and format.
        layout: the layout with precision, replica and format; its name is also the baseline's.
        copies: whether local copies replace the barrier.
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
        """Return whether some shard has a single holder, so that only exceptions can be survived."""
        return self.family in ALONE

    def phases(self) -> tuple[str, ...]:
        """Return the phases of the cell's moment, reached by its ranks, with survivable faults."""
        overlapped = "--overlap-param-gather" in self.layout.extra
        # With overlap, parameters are gathered in the next step; without a distributed optimizer, never.
        gathers = self.layout.distributed_optimizer and not overlapped
        return tuple(
            phase
            for phase in MOMENTS[self.moment]
            if (self.copies or phase != "copy")
            and (gathers or phase != "gather")
            and (not self.alone or self.copies or self.moment == "early" or phase in _READABLE)
        )

    def fault(self, seed: int, skipped: Collection[int]) -> tuple[Fault, set[int]]:
        """Return the fault, and the steps to which last words may belong.

        Args:
            seed: for the choice of step, rank and phase.
            skipped: steps without an update in the unmodified framework, which do not reach every phase.
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
    """Return all cells in turns: each turn has a cell of every layout with cells left.

    Args:
        faults: 1 for a single fault in each combination, alternately early and late; 2 for both.
    """
    queues = [_of(layout, number, faults) for number, layout in enumerate(LAYOUTS)]
    return [cell for turn in itertools.zip_longest(*queues) for cell in turn if cell is not None]


def _of(layout: Layout, number: int, faults: int) -> list[Cell]:
    """Return the cells of a layout, shuffled, so that the first turns have some of all."""
    moments = list(MOMENTS)
    cells_of_layout = []
    for turn, (precision, (replica, cut), copies, format) in enumerate(_combinations(layout)):
        for moment in (moments + moments)[(turn + number) % 2 :][:faults]:
            saving_layout = _saving(_in(cut, layout, precision), format)
            cells_of_layout.append(Cell(layout.name, saving_layout, replica, copies, format, moment))
    random.Random(layout.name).shuffle(cells_of_layout)
    return cells_of_layout


def _combinations(layout: Layout) -> Iterator[tuple[str, tuple[str, Layout], bool, str]]:
    """Yield precision, replica, local copies and format."""
    yield from itertools.product(("bf16",), replicas(layout), (False, True), ("torch",))
    if layout in VARIED:
        has_expert_parallelism = "--expert-model-parallel-size" in layout.extra
        precisions = ("fp32",) if has_expert_parallelism else ("fp16", "fp32")  # the framework's rule
        yield from itertools.product(precisions, replicas(layout), (False, True), ("torch",))
        yield from itertools.product(("bf16",), replicas(layout), (False,), ("torch_dist",))
    if layout in (DP2, DP3):
        yield from itertools.product(("bf16",), replicas(layout), (False,), ("torch_dist, async",))


def _in(cut: Layout, layout: Layout, precision: str) -> Layout:
    """Return `cut`, a layout with a replica, in another precision."""
    if precision == cut.precision:
        return cut
    return replace(cut, name=cut.name.replace(layout.name, f"{layout.name}-{precision}"), precision=precision)


def _saving(layout: Layout, format: str) -> Layout:
    """Return a layout that saves in another format."""
    if format == "torch":
        return layout
    name = f"{layout.name}-{format.replace(', ', '-').replace('_', '-')}"
    return replace(layout, name=name, extra=(*layout.extra, *FORMATS[format].arguments))
