"""The faults of a campaign of online recovery, drawn from a seed, and the outcomes of its incidents."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import _bench  # noqa: F401  (puts the root on the path)
from _job import Job
from _layouts import CUTS, Cut
from _schedule import CHOICE, HANGS, LEARNT, ON_RANK_0, SAVE_INTERVAL

from adaptor.protocol.records import unix
from tests.faults import harness
from tests.faults.fault import NEWCOMERS, ONCE, Fault

# The layouts of the other campaign, and layouts that differ only in process groups and buckets.
LAYOUTS: Mapping[str, Cut] = {
    **{name: cut for name, cut in CUTS.items() if cut.nodes == 1},
    "vpp2-dp2": Cut(harness.VPP2_DP2),
    "moe-dp4-ep2": Cut(harness.MOE_EP2),
    "moe-dp4-ep2-mirror": Cut(harness.MOE_EP2_MIRROR),
    "dp2-overlap": Cut(harness.DP2_OVERLAP),
    "dp3-overlap": Cut(harness.DP3_OVERLAP),
    "dp2-fp16": Cut(harness.DP2_FP16),
    "dp2-fp32": Cut(harness.DP2_FP32),
    "tp2-dp2-sequence": Cut(harness.TP2_DP2_SP),
}
# Loops on Megatron-core, which a campaign has only on request.
LIBRARY: Mapping[str, Cut] = {
    "core-dp4": Cut(harness.DP4, library=("--stream",)),
    "core-tp2-dp2": Cut(harness.TP2_DP2, library=("--stream",)),
    "core-dp4-whole": Cut(
        replace(harness.DP2_WHOLE, name="dp4-whole-optimizer", processes=4), library=("--stream",)
    ),
    "core-dp2-whole": Cut(harness.DP2_WHOLE, library=("--stream",)),
    "core-dp4-accumulates": Cut(harness.DP4, library=("--accumulate", "2")),
}
ALL = {**LAYOUTS, **LIBRARY}
# Layouts whose holders are not modelled: a state that is lost after a single death is a failure.
UNKNOWN = ("moe-dp4-ep2", "moe-dp4-ep2-mirror")
STEPS = 36
# The most faults of a job: after as many recoveries as one generation may have, it restarts.
MOST = 6
# The weight of each kind of fault.
KINDS: Mapping[str, int] = {
    "sigkill": 7,
    "sigsegv": 1,
    "oom": 1,
    "os._exit": 2,
    "sys.exit": 1,
    "exception": 4,
    "nan": 1,
    "deadlock": 1,
    "sigstop": 1,
    "holds-the-gil": 1,
}
# Second faults: phases of survivors, phases of new processes, and kinds.
OF_SURVIVORS = ("freeze", "regroup", "give", "exchange", "joined", "proceed")
OF_NEWCOMERS = ("start", "get", "exchange", "joined", "proceed")
SECOND = ("sigkill", "sigkill", "sigkill", "os._exit", "sigstop")
TWO_AT_ONCE = 0.1
ONLINE, RESTART, EXPLAINED, FAILED = OUTCOMES = ("online", "restart", "explained", "failed")
WHY = "not recovered online: "


@dataclass(frozen=True)
class Planned:
    """A fault, and perhaps a second one in the incident that it opens."""

    fault: Fault
    second: Fault | None

    @property
    def faults(self) -> list[Fault]:
        return [self.fault] if self.second is None else [self.fault, self.second]


@dataclass(frozen=True)
class Drawn:
    """A job: its layout, and its faults in order."""

    number: int
    cut: str
    planned: tuple[Planned, ...]
    spares: int

    @property
    def faults(self) -> list[Fault]:
        return [fault for planned in self.planned for fault in planned.faults]


def draw(seed: int, cuts: Sequence[str], share: float, kinds: Sequence[str]) -> Iterator[Drawn]:
    """Yield jobs without end; a `share` of their faults is followed by a second one."""
    source, number = random.Random(seed), 0
    while True:
        name = cuts[number % len(cuts)]
        yield Drawn(number, name, tuple(_faults(source, ALL[name], share, kinds)), source.randint(0, 1))
        number += 1


def _faults(source: random.Random, cut: Cut, share: float, kinds: Sequence[str]) -> Iterator[Planned]:
    step = 1
    for _ in range(MOST):
        phase, kind = source.choice(CHOICE), source.choice(kinds)
        if phase == "gather" and not cut.layout.distributed_optimizer:
            phase = "update"  # nothing is gathered
        if cut.library is not None:  # it saves nothing, and only its own log follows a step
            phase = "forward" if phase == "data" else phase
            phase = "logging" if phase == "between" or phase.startswith("save") else phase
        if kind in HANGS and (phase in ("between", "logging") or phase.startswith("save")):
            kind = "sigkill"  # there only the framework's own timeouts detect a hang
        if kind == "nan" and phase not in ("data", "forward", "backward"):
            kind = "exception"  # later in the step, the framework itself would save it
        step += source.randint(3, 5) + (LEARNT if kind in HANGS else 0)
        if phase.startswith("save"):
            step += -step % SAVE_INTERVAL
        rank = 0 if phase in ON_RANK_0 else source.randrange(cut.ranks)
        fault = Fault(rank, phase, kind, step=step, restart=ONCE, code=source.choice((0, 7)))
        peers = [rank_of_cut for rank_of_cut in range(cut.ranks) if rank_of_cut != rank]
        second = None
        chance = source.random()
        if chance < share:
            second = _second(source, fault, peers)
        elif kind == "sigkill" and chance > 1 - TWO_AT_ONCE:
            fault = replace(fault, also=source.choice(peers))
        if step > STEPS - 2:
            return
        yield Planned(fault, second)


def _second(source: random.Random, first: Fault, peers: Sequence[int]) -> Fault:
    kind, code = source.choice(SECOND), 7
    if first.kind != "exception" and source.random() < 0.4:
        phase = source.choice(OF_NEWCOMERS)
        return Fault(first.rank, phase, kind, restart=NEWCOMERS, since=first.step, code=code)
    phase = source.choice(OF_SURVIVORS)
    kind = "exception" if phase == "give" and source.random() < 0.5 else kind
    return Fault(source.choice(peers), phase, kind, restart=ONCE, since=first.step, code=code)


@dataclass(frozen=True)
class Incident:
    """An incident and its outcome.

    Attributes:
        struck: the faults that struck in it, as text.
        outcome: online; restart: last words of the newest finished step, and a restart of all; explained: a
            shard had no holder left; failed: anything else.
        why: the reason of a restart.
        seconds: from the fault until all ranks were told to go on; 0 unless online.
    """

    cut: str
    struck: tuple[str, ...]
    kind: str
    phase: str
    outcome: str
    why: str
    seconds: float
    step: int


def incidents(drawn: Drawn, job: Job) -> list[Incident]:
    """Return the outcome of each incident of a job that has ended, in order."""
    stamps, outcomes = job.struck(), []
    faults = {str(fault): fault for fault in drawn.faults}
    for report in job.incidents():
        until = max(unix(event["time"]) for event in report["events"])
        own_stamps = [stamp for stamp in stamps if stamp["time"] <= until]
        stamps = [stamp for stamp in stamps if stamp["time"] > until]
        struck = [faults[stamp["fault"]] for stamp in own_stamps]
        first = struck[0] if struck else None
        outcome, reason = outcome_of(drawn, report, struck)
        outcomes.append(
            Incident(
                drawn.cut,
                tuple(map(str, struck)),
                first.kind if first else "",
                first.phase if first else "",
                outcome,
                reason,
                until - own_stamps[0]["time"] if own_stamps and outcome == ONLINE else 0.0,
                int(report["step"] or -1),
            )
        )
    return outcomes


def outcome_of(drawn: Drawn, report: Mapping[str, Any], struck: Sequence[Fault]) -> tuple[str, str]:
    """Return the outcome of the incident of `report`, in which the faults `struck` struck, and its reason."""
    verdict, reason = str(report["verdict"]), str(report["reason"])
    if not struck:
        return FAILED, f"no fault of ours: {reason}"
    if verdict == "recovered":
        return ONLINE, ""
    if verdict == "saved":
        _, separator, explanation = reason.partition(WHY)
        return (RESTART, explanation.partition("; step")[0]) if separator else (FAILED, reason)
    deaths = len({fault.rank for fault in struck}) + sum(fault.also is not None for fault in struck)
    survives = deaths < 2 if drawn.cut in UNKNOWN else ALL[drawn.cut].survives(struck)
    return (FAILED if survives else EXPLAINED), reason


def differences(reference: Job, job: Job, interrupted: Collection[int]) -> list[str]:
    """Return the differences, bit for bit, of a job's records from the undisturbed run, a line each.

    Args:
        reference: the undisturbed run.
        job: the job.
        interrupted: steps that an incident interrupted: struck ranks have no record of them.
    """
    expected = {
        (rank, line["iteration"]): (line["losses"], line["grad_norm"], line["skipped"])
        for rank, records in reference.records().items()
        for line in records
    }
    compared, problems = set(), []
    for rank, records in job.records().items():
        for line in records:
            key = (rank, line["iteration"])
            compared.add(key)
            if expected.get(key) != (line["losses"], line["grad_norm"], line["skipped"]):
                problems.append(f"rank {rank}, step {key[1]}: not as in the undisturbed run")
    missing = [
        f"rank {rank} has not recorded step {step}"
        for rank, step in sorted(expected.keys() - compared)
        if step not in interrupted
    ]
    return problems + missing
