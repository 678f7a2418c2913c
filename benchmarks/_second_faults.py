"""Draws second faults: a first fault opens an online recovery, the second strikes a part of that recovery."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence

from _bench import table
from _layouts import Cut
from _online import ALL, EXPLAINED, FAILED, ONLINE, RESTART, STEPS, Drawn, Incident, Planned
from _schedule import LEARNT
from torch.distributed import ProcessGroupGloo

from tests.faults.fault import NEWCOMERS, ONCE, PHASES, Fault

# The layouts: copies of each shard on two ranks, on all ranks; a loop on Megatron-core, and Megatron-LM's.
CUTS = ("core-dp4", "core-dp4-whole", "dp4")
# A recovery with a second fault exchanges the process groups twice, and torch before 2.14 allows ten.
MOST_FIRST = 8 if hasattr(ProcessGroupGloo, "get_reconfigure_handle") else 4
# A hang takes many times as long as any other kind, so it is drawn less often.
FIRST_KINDS = ("sigkill",) * 10 + ("os._exit",) * 2 + ("exception",) * 3 + ("deadlock",)
FIRST_PHASES = ("data", "forward", "backward", "reduction", "norm", "door-before", "door-after", "update")
NEWCOMER, TWIN, SURVIVOR, AGENT, SPARE = WHO = ("new-process", "twin", "survivor", "ttprun", "spare")
_DEADLY = ("sigkill",) * 4 + ("os._exit",) * 2 + ("sigstop",)
_RAISES = ("exception", "exception", "deadlock")
# Each line: the struck part, the phase, the kinds. A phase in the thread that obeys orders has no exception.
SECONDS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    (NEWCOMER, "imports", (*_DEADLY, *_RAISES)),
    (NEWCOMER, "build", (*_DEADLY, *_RAISES)),
    (NEWCOMER, "get", (*_DEADLY, *_RAISES)),
    (NEWCOMER, "exchange", (*_DEADLY, *_RAISES)),
    (NEWCOMER, "joined", (*_DEADLY, *_RAISES)),
    (NEWCOMER, "proceed", _DEADLY),
    (TWIN, "give", (*_DEADLY, *_RAISES)),
    (SURVIVOR, "freeze", _DEADLY),
    (SURVIVOR, "regroup", (*_DEADLY, *_RAISES)),
    (SURVIVOR, "exchange", (*_DEADLY, *_RAISES)),
    (SURVIVOR, "joined", (*_DEADLY, *_RAISES)),
    (SURVIVOR, "proceed", _DEADLY),
    (AGENT, "regroup", ("agent-pause",)),
    (AGENT, "exchange", ("agent-pause",)),
    (SPARE, "freeze", ("spare-sigkill", "spare-sigstop")),
)


WHAT = """\
Jobs of three layouts train a tiny GPT, with Megatron-LM's `pretrain_gpt.py` (`dp4`) or in a loop on
Megatron-core, under `ttprun --ttp-online 32`. Up to four first faults strike each job, one after another. A
second fault follows each of them while the job recovers online: in the new process, in the rank that sends to
it (its twin), in another survivor, in ttprun (stopped for some seconds), or in the spare process that waits.
All is drawn from a seed; a second fault is drawn so that each shard keeps a holder. A draw whose second fault
did not strike, because its phase was not reached, is not in the first table.

- online: only failed ranks got a new process, and no step was lost, also where the second fault came at the
  end of the recovery and opened another incident.
- restart from the published step: all workers started again from the newest finished step.
- lost: anything else.

Every job had to come to its last step. Every loss and grad norm of every rank, and the checkpoint at the end
of `dp4`, were compared bit for bit with a run of the unmodified framework without faults. Half of the jobs
have a spare process."""


def draw(seed: int, cuts: Sequence[str], struck: Sequence[str] = WHO) -> Iterator[Drawn]:
    """Yield jobs without end; a second fault in one of the parts `struck` follows each first fault."""
    source, number = random.Random(seed), 0
    while True:
        name = cuts[number % len(cuts)]
        spares = 1 if list(struck) == [SPARE] else source.randint(0, 1)
        yield Drawn(number, name, tuple(_planned(source, ALL[name], spares, struck)), spares)
        number += 1


def _planned(source: random.Random, cut: Cut, spares: int, struck: Sequence[str]) -> Iterator[Planned]:
    step = 1
    for _ in range(MOST_FIRST):
        kind, phase = source.choice(FIRST_KINDS), source.choice(FIRST_PHASES)
        if phase == "data" and cut.library is not None:
            phase = "forward"  # Megatron-core has no function that fetches a batch
        step += source.randint(3, 5) + (LEARNT if kind == "deadlock" else 0)
        if step > STEPS - 2:
            return
        if not {NEWCOMER, SURVIVOR}.intersection(struck):
            kind = "sigkill"  # an exception replaces nobody
        first = Fault(source.randrange(cut.ranks), phase, kind, step=step, restart=ONCE, code=7)
        yield Planned(first, _second(source, cut, first, spares, struck))


def _second(source: random.Random, cut: Cut, first: Fault, spares: int, struck: Sequence[str]) -> Fault:
    """Return a second fault after which each shard still has a holder."""
    while True:
        part, phase, kinds = source.choice([line for line in SECONDS if line[0] in struck])
        kind = source.choice(kinds)
        # A fault that does not strike in this recovery strikes in no other one.
        conditions = {"since": first.step, "until": first.step + 1, "code": 7}
        if part == NEWCOMER and first.kind != "exception":
            return Fault(first.rank, phase, kind, restart=NEWCOMERS, **conditions)
        peers = [rank for rank in range(cut.ranks) if rank != first.rank]
        if part in (AGENT, SPARE) and (part == AGENT or (spares and first.kind != "exception")):
            return Fault(source.choice(peers), phase, kind, restart=ONCE, **conditions)
        if part not in (TWIN, SURVIVOR) or (part == TWIN and first.kind == "exception"):
            continue
        # An exception or a deadlock in the thread that sends leaves the process of the twin as it is.
        is_kept = phase == "give" and kind in _RAISES
        # After the barrier peers may make the update, which a rank that raises there never makes.
        is_intact = first.kind == "exception" and first.phase not in ("door-after", "update")
        lost = set() if is_intact else {first.rank}
        if part == TWIN:  # the first other rank with the same shard sends
            peers = [min(next(holder for holder in cut.holders() if first.rank in holder) - {first.rank})]
        candidates = [
            rank for rank in peers if is_kept or all(holders - lost - {rank} for holders in cut.holders())
        ]
        if candidates:
            return Fault(source.choice(candidates), phase, kind, restart=ONCE, **conditions)


def who_is_struck(fault: Fault) -> str:
    """Return the part of the recovery that a second fault strikes."""
    if fault.kind.startswith("agent-"):
        return AGENT
    if fault.kind.startswith("spare-"):
        return SPARE
    if fault.restart == NEWCOMERS:
        return NEWCOMER
    return TWIN if fault.phase == "give" else SURVIVOR


def outcome_table(incidents: Sequence[Incident]) -> str:
    """Return the outcomes of the recoveries by the phase that a second fault has struck."""
    rows: dict[tuple[str, str], dict[str, int]] = {}
    for incident in incidents:
        for fault in map(Fault.parse, incident.struck):
            if fault.since is None:
                continue
            row = rows.setdefault((who_is_struck(fault), PHASES[fault.phase]), {})
            outcome = EXPLAINED if "nobody else holds" in incident.why else incident.outcome
            row[outcome] = row.get(outcome, 0) + 1
    outcomes = (ONLINE, RESTART, EXPLAINED, FAILED)
    head = ["struck", "phase", "draws", "online", "restart from the published step"]
    head += ["the same, no holder was left", "lost"]
    order = {(part, PHASES[phase]): index for index, (part, phase, _) in enumerate(SECONDS)}
    lines = [_row(*key, rows[key], outcomes) for key in sorted(rows, key=lambda key: order[key])]
    total = {name: sum(row.get(name, 0) for row in rows.values()) for name in outcomes}
    return table(head, [*lines, _row("all", "", total, outcomes)])


def _row(part: str, phase: str, counts: Mapping[str, int], outcomes: Sequence[str]) -> list[object]:
    return [part, phase, sum(counts.values()), *(counts.get(name, 0) for name in outcomes)]
