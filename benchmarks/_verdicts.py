"""What became of the faults of a campaign: an incident judged, records compared, the tables, the page."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import table
from _job import Job
from _layouts import CUTS
from _schedule import CHOICE, IN_AN_INCIDENT, Planned

from adaptor.checkpoint import manifest, naming
from adaptor.checkpoint.publish import tracked_step
from adaptor.launchers.node import EXIT_GRACE_S, FAREWELL_S
from tests.faults.fault import KINDS, PHASES, Fault

# An agent tidies up when every worker is gone.
TIDY_S = EXIT_GRACE_S + FAREWELL_S + 2.0
UNHELD = ("has no live holder", "nobody is left who can write")
BEHIND = "was not finished on every rank"
SURVIVED, EXPLAINED, FAILED = OUTCOMES = ("survived", "explained", "failed")


@dataclass(frozen=True)
class Incident:
    """One incident and what became of it.

    second    kind and phase of the second fault, if it struck
    outcome   survived: the newest finished step is saved; explained: it could not be, and the last line says
              why, and nothing was harmed; failed: anything else, `problems` says what
    """

    number: int
    cut: str
    fault: str
    kind: str
    phase: str
    second: tuple[str, str] | None
    saved: int
    published_s: float
    outcome: str
    problems: tuple[str, ...]


def judge(job: Job, report: Mapping[str, Any], planned: Planned) -> Incident:
    """Whether an incident went as promised, by its report, the newest of `job`, and by the save folder as it
    has left it."""
    restart = planned.fault.restart
    stamps = [stamp for stamp in job.struck() if stamp["restart"] == restart]
    struck = _struck(stamps, planned)
    saved, reason, finished = (
        int(report["step"]),
        str(report["reason"]),
        newest_finished(job, report, restart),
    )
    survives = CUTS[planned.cut].survives(struck)
    problems = [] if planned.fault in struck else [f"no fault of ours: {reason}"]
    outcome, published_s = SURVIVED, 0.0
    if report["verdict"] == "saved":
        problems += checkpoint_problems(job.save, saved)
        behind = survives is None or (CUTS[planned.cut].local_copy and saved == finished - 1)
        if saved < finished and not (behind and BEHIND in reason):
            problems.append(f"step {finished} is finished, step {saved} is saved: {reason}")
        if survives is False:
            problems.append("saved, and no holder should have been left")
        published = [event["t"] for event in report["events"] if event["what"] == "published"]
        published_s = published[0] - stamps[0]["time"] if published and stamps else 0.0
    elif report["verdict"] == "lost" and not survives and any(words in reason for words in UNHELD):
        outcome = EXPLAINED
        problems += checkpoint_problems(job.save, tracked_step(job.save))
    else:
        problems.append(reason)
    second = next((f for f in struck if f is planned.second), None)
    return Incident(
        planned.number,
        planned.cut,
        str(planned),
        planned.fault.kind,
        planned.fault.phase,
        second and (second.kind, second.phase),
        saved,
        published_s,
        FAILED if problems else outcome,
        tuple(problems),
    )


def _struck(stamps: Sequence[Mapping[str, Any]], planned: Planned) -> list[Fault]:
    marks = {(stamp["rank"], stamp["phase"], stamp["kind"]) for stamp in stamps}
    return [fault for fault in planned.faults if (fault.rank, fault.phase, fault.kind) in marks]


def newest_finished(job: Job, report: Mapping[str, Any], restart: int) -> int:
    """The newest step that any rank has finished: by the records, by the boards, and inside the incident."""
    records = [line for found in job.records().values() for line in found]
    steps: list[int] = [line["iteration"] for line in records if line["restart"] == restart]
    for event in report["events"]:
        words = {"fault-noticed": "after step ", "frozen": "after step ", "through-the-door": "step "}
        _, found, number = event["detail"].rpartition(words.get(event["what"], "\0"))
        steps += [int(number)] if found and number.isdigit() else []
    return max(steps, default=0)


def checkpoint_problems(save: Path, step: int | None) -> list[str]:
    """What is wrong in the save folder, where `step` is the newest checkpoint."""
    problems = []
    if tracked_step(save) != step:
        problems.append(f"the tracker says {tracked_step(save)}, step {step} was saved")
    problems += manifest.verify(save / naming.final_name(step)) if step is not None else []
    # The agent tidies up once every worker is gone, a moment after its report; a restart takes longer.
    deadline = time.monotonic() + TIDY_S
    while (strange := _strange(save)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return problems + [f"{name} is left behind" for name in strange]


def _strange(save: Path) -> list[str]:
    names = [path.name for path in save.iterdir() if naming.step_of(path.name) is None]
    return [name for name in names if name != naming.TRACKER]


def compare(undisturbed: Job, jobs: Sequence[Job], saved: Iterable[int]) -> tuple[int, list[str]]:
    """How many records of `jobs` are those of the undisturbed run, bit for bit, and what is wrong.

    saved  the steps of last words: one that was finished while its incident was open has no record
    """
    known = {
        (rank, line["iteration"]): (line["losses"], line["grad_norm"])
        for rank, found in undisturbed.records().items()
        for line in found
    }
    equal, problems, seen = 0, [], set()
    for job in jobs:
        for rank, found in job.records().items():
            for line in found:
                key = (rank, line["iteration"])
                seen.add(key)
                if known.get(key) == (line["losses"], line["grad_norm"]):
                    equal += 1
                else:
                    problems.append(f"rank {rank}, step {line['iteration']}: not as in the reference")
    kept = set(saved)
    newest = max(kept, default=0)
    missing = {step for _, step in known.keys() - seen if step not in kept and step < newest}
    return equal, problems + [f"step {step} was not recorded on every rank" for step in sorted(missing)]


def fault_table(incidents: Sequence[Incident]) -> str:
    """Survived / explained / failed: a column for each kind of fault, a line for each phase."""
    rows = [(PHASES[phase], [one for one in incidents if one.phase == phase]) for phase in CHOICE]
    return _table("the fault strikes", rows, {id(one): one.kind for one in incidents}, times=True)


def second_table(incidents: Sequence[Incident]) -> str:
    """The same, of the second faults."""
    struck = [one for one in incidents if one.second is not None]
    kinds = {id(one): one.second[0] for one in struck if one.second is not None}
    rows = [
        (PHASES[phase], [one for one in struck if one.second is not None and one.second[1] == phase])
        for phase in IN_AN_INCIDENT
    ]
    return _table("the second fault strikes", rows, kinds)


def cut_table(incidents: Sequence[Incident], equal: Mapping[str, int]) -> str:
    """The same by layout, and how many of its records were compared."""
    names = [name for name in CUTS if any(one.cut == name for one in incidents)]
    rows = [
        [name, CUTS[name].words, _cell([one for one in incidents if one.cut == name]), equal[name]]
        for name in names
    ]
    return table(["layout", "", "incidents", "records as in the reference"], rows)


def _table(
    head: str,
    rows: Sequence[tuple[str, Sequence[Incident]]],
    kinds: Mapping[int, str],
    *,
    times: bool = False,
) -> str:
    columns = [kind for kind in KINDS if kind in kinds.values()]

    def of(incidents: Sequence[Incident]) -> list[str]:
        cells = [_cell([one for one in incidents if kinds[id(one)] == kind]) for kind in columns]
        cells.append(_cell(incidents))
        good = [one.published_s for one in incidents if one.published_s]
        median = f"{1000 * statistics.median(good):.0f}" if good else "–"
        return [*cells, median] if times else cells

    everything = [one for _, incidents in rows for one in incidents]
    last = ["fault to published, ms"] if times else []
    return table(
        [head, *columns, "all", *last],
        [*([name, *of(incidents)] for name, incidents in rows), ["all", *of(everything)]],
    )


def _cell(incidents: Sequence[Incident]) -> str:
    count = Counter(one.outcome for one in incidents)
    return " / ".join(str(count[outcome]) for outcome in (SURVIVED, EXPLAINED, FAILED)) if incidents else "–"
