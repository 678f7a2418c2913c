"""The faults of a campaign, drawn from a seed before any job runs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from _layouts import CUTS, Cut

from tests.faults.fault import ONLINE, PHASES, Fault

SAVE_INTERVAL = 7
IN_AN_INCIDENT = ("freeze", "dump", "let-through", "dump-gather", "dump-write", "dump-written")
# CHOICE has the phases of a step and of a regular save. The phases of _ELSEWHERE belong to other tests:
# before there is anything to save, in a data set, in the middle of a local copy, and in an online recovery
# (`_online.py`).
# No job of a campaign evaluates, saves asynchronously or has nodes with their own disks. The faults of a seed
# must stay the same.
_APART = ("save-apart", "save-apart-named")
_EVALUATION = ("evaluation", "evaluation-forward")
_ELSEWHERE = (
    *("start", "read", "copy", *_EVALUATION, "logging", "logger", "line", "finished", "rollout"),
    *("exchanged", "updated", "activation"),  # of the comparison of holders (TTP_VERIFY_EVERY)
    *("save-background", *_APART, *ONLINE),
)
CHOICE = tuple(phase for phase in PHASES if phase not in (*_ELSEWHERE, *IN_AN_INCIDENT))
# Phases that only rank 0 reaches.
ON_RANK_0 = ("save-write", "save-tracker", "save-named")
HANGS = ("deadlock", "sigstop", "holds-the-gil")
# The kinds of faults, with their weights.
KINDS: Mapping[str, int] = {
    "sigkill": 5,
    "sigsegv": 1,
    "oom": 2,
    "os._exit": 2,
    "sys.exit": 1,
    "exception": 3,
    "nan": 3,
    "deadlock": 1,
    "sigstop": 1,
    "holds-the-gil": 1,
    "sigterm": 1,
    "agent-sigterm": 1,
    "agent-sigint": 1,
    "tree-sigterm": 1,
    "agent-sigkill": 6,
    "controller-sigkill": 6,
    "cut": 6,
}
# The same fault on the node of the controller; the next node takes over.
ON_THE_CONTROLLER = {"controller-sigkill": "agent-sigkill"}
# Kinds that separate a node from the others, after which the job ends.
OF_NODES = ("agent-sigkill", "cut")
# Milliseconds after which a cut is mended: by then both sides have noticed the cut, and save or have saved.
HEALS = (2000, 6000)
SECOND = ("sigkill", "sigkill", "os._exit", "exception", "sigstop")
# Phases for an exception; elsewhere in an incident it would be one of the adaptor's own code.
RAISES_IN = ("dump", "dump-gather", "dump-write")
# Steps before the pace is known; a hang is not noticed earlier.
LEARNT = 3
TWO_AT_ONCE = 0.1


@dataclass(frozen=True)
class Planned:
    """An incident to come.

    Attributes:
        fault: the fault that opens the incident.
        after: steps from the previous fault to this one.
        second: a second fault, which strikes if the incident reaches its phase.
    """

    number: int
    cut: str
    fault: Fault
    after: int
    second: Fault | None

    @property
    def kind(self) -> str:
        """The kind in the schedule's terms."""
        is_node_0 = CUTS[self.cut].node(self.fault.rank) == 0
        names = [name for name, kind in ON_THE_CONTROLLER.items() if is_node_0 and kind == self.fault.kind]
        return names[0] if names else self.fault.kind

    def at(self, base: int, restart: int) -> Planned:
        """Return the incident with its generation and step, given the step `base` of the previous fault."""
        step = base + self.after
        if self.fault.phase.startswith("save"):
            step += -step % SAVE_INTERVAL
        second = self.second and replace(self.second, restart=restart)
        return replace(self, fault=replace(self.fault, step=step, restart=restart), second=second)

    @property
    def faults(self) -> list[Fault]:
        return [self.fault] if self.second is None else [self.fault, self.second]

    def __str__(self) -> str:
        fault = self.fault
        text = f"{self.cut}: {self.kind} of rank {fault.rank}"
        text += f" and {fault.also}" if fault.also is not None else ""
        text += f", {fault.phase}" + (f" of step {fault.step}" if fault.step is not None else "")
        second = self.second
        return text if second is None else f"{text}; {second.kind} of rank {second.rank}, {second.phase}"


def schedule(
    seed: int, count: int, kinds: Sequence[str], cuts: Sequence[str], share: float
) -> Iterator[Planned]:
    """Yield `count` incidents; a `share` of them has a second fault.

    A kind that is named twice is drawn twice as often.
    """
    source, other_source = random.Random(seed), random.Random(f"{seed} more")
    for number in range(count):
        name = other_source.choice(cuts)
        cut = CUTS[name]
        phase = source.choice(CHOICE)
        if phase == "gather" and not cut.layout.distributed_optimizer:
            phase = "update"  # nothing is gathered
        rank = 0 if phase in ON_RANK_0 else source.randrange(cut.ranks)
        steps_after = source.randint(2, 4)
        kind = source.choice([kind for kind in kinds if _fits(kind, phase, rank, cut)] or ["sigkill"])
        steps_after += LEARNT if kind in HANGS else 0
        fault = Fault(rank, phase, ON_THE_CONTROLLER.get(kind, kind))
        if "exit" in kind:
            fault = replace(fault, code=other_source.choice((0, 7)))
        elif kind == "cut":
            fault = replace(fault, heals=other_source.randrange(*HEALS))
        second = None
        draw = other_source.random()
        if kind != "nan" and draw < share:
            second = _second(other_source, cut, fault)
        elif share and kind == "sigkill" and draw > 1 - TWO_AT_ONCE and cut.nodes == 1:
            fault = replace(fault, also=other_source.choice([r for r in range(cut.ranks) if r != rank]))
        yield Planned(number, name, fault, steps_after, second)


def _second(source: random.Random, cut: Cut, first: Fault) -> Fault:
    kind = source.choice(SECOND)
    phase = source.choice(RAISES_IN if kind == "exception" else IN_AN_INCIDENT)
    candidates = [r for r in range(cut.ranks) if r != first.rank]
    if first.kind == "agent-sigkill":
        candidates = [r for r in candidates if cut.node(r) != cut.node(first.rank)]
    # The first of the others is usually the writer.
    rank = candidates[0] if source.random() < 0.5 else source.choice(candidates)
    return Fault(rank=rank, phase=phase, kind=kind, code=7)


def _fits(kind: str, phase: str, rank: int, cut: Cut) -> bool:
    if kind in HANGS:  # between two steps only the framework's own timeouts detect a hang
        return phase != "between" and not phase.startswith("save")
    if kind == "nan":  # later in the step, the framework itself would save it
        return phase in ("data", "forward", "backward")
    if kind in ("agent-sigkill", "controller-sigkill"):
        return cut.nodes > 1 and (cut.node(rank) == 0) == (kind in ON_THE_CONTROLLER)
    return kind != "cut" or cut.nodes > 1
