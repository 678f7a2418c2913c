"""What became of the faults of a campaign: an incident judged, records compared, the tables, the page."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import table
from _job import Job
from _layouts import CUTS
from _schedule import CHOICE, IN_AN_INCIDENT, KINDS, SECOND, Planned

from adaptor.checkpoint import manifest
from adaptor.checkpoint.tracker import tracked_step
from adaptor.launchers.agent.worker_watch import EXIT_GRACE_S, SHUTDOWN_GRACE_S
from adaptor.protocol import naming
from adaptor.protocol.records import unix
from tests.faults.fault import PHASES, Fault

# An agent tidies up when every worker is gone.
TIDY_S = EXIT_GRACE_S + SHUTDOWN_GRACE_S + 2.0
UNHELD = ("has no live holder", "nobody is left who can write")
BEHIND = "was not finished on every rank"
SURVIVED, EXPLAINED, FAILED = OUTCOMES = ("survived", "explained", "failed")
LEFT = "not run"


@dataclass(frozen=True)
class Incident:
    """One incident and what became of it.

    kind      as the schedule names it
    second    kind and phase of the second fault, if it struck
    saved     the newest step of the last words; -1: there are none
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


@dataclass(frozen=True)
class _Side:
    """What one controller has made of an incident; `saved` is -1 where nothing was."""

    saved: int
    published: float | None
    problems: list[str]


def judge(job: Job, reports: Sequence[Mapping[str, Any]], planned: Planned) -> Incident:
    """Whether an incident went as promised: by its report, or one of each side where the network was cut, and
    by the save folder as it has left it."""
    stamps = [stamp for stamp in job.struck() if stamp["restart"] == planned.fault.restart]
    struck = _struck(stamps, planned)
    cut = planned.fault in struck and planned.fault.kind == "cut"
    sides = [
        _judge_side(job, report, planned, struck, side_of(report) if cut else None) for report in reports
    ]
    problems = [] if planned.fault in struck else [f"no fault of ours: {reports[0]['reason']}"]
    problems += [problem for side in sides for problem in side.problems]
    if cut:
        silent = set(range(CUTS[planned.cut].nodes)) - {side_of(report) for report in reports}
        problems += [f"node {node} has not said what it made of the cut" for node in sorted(silent)]
    saved = max(side.saved for side in sides)
    alone = planned.fault in struck and planned.kind == "controller-sigkill"
    problems += checkpoint_problems(job.save, saved if saved >= 0 else tracked_step(job.save), alone)
    published = [side.published for side in sides if side.published is not None]
    second = next((f for f in struck if f is planned.second), None)
    outcome = SURVIVED if saved >= 0 else EXPLAINED
    return Incident(
        planned.number,
        planned.cut,
        str(planned),
        planned.kind,
        planned.fault.phase,
        second and (second.kind, second.phase),
        saved,
        min(published) - stamps[0]["time"] if published and stamps else 0.0,
        FAILED if problems else outcome,
        tuple(problems),
    )


def _judge_side(
    job: Job, report: Mapping[str, Any], planned: Planned, struck: Sequence[Fault], side: int | None
) -> _Side:
    saved, reason = int(report["step"] or -1), str(report["reason"])
    # Who is lost after it has said that its files are written has given all that it had.
    given = {event.get("rank") for event in report["events"] if event["type"] == "written"}
    before = [fault for fault in struck if fault.phase != "dump-written" or fault.rank not in given]
    survives = CUTS[planned.cut].survives(before, side)
    problems: list[str] = []
    if report["verdict"] == "saved":
        finished = newest_finished(job, report, planned.fault.restart)
        behind = survives is None or (CUTS[planned.cut].local_copy and saved == finished - 1)
        if saved < finished and not (behind and BEHIND in reason):
            problems.append(f"step {finished} is finished, step {saved} is saved: {reason}")
        if survives is False and not _was_found(report):
            problems.append("saved, and no holder should have been left")
        published = [unix(event["time"]) for event in report["events"] if event["type"] == "published"]
        return _Side(saved, published[0] if published else None, problems)
    if report["verdict"] != "lost" or survives or not any(words in reason for words in UNHELD):
        problems.append(reason)
    return _Side(-1, None, problems)


def _was_found(report: Mapping[str, Any]) -> bool:
    """Return True where the step stood in the save folder already: it is looked for once no holder is left.

    The other side of a cut has written it, an earlier controller, or the framework's own save.
    """
    types = {event["type"] for event in report["events"]}
    return "find-ordered" in types and "publish-ordered" not in types


def side_of(report: Mapping[str, Any]) -> int:
    """The node whose controller has written it."""
    return next((int(event["node"]) for event in report["events"] if event["type"] == "took-over"), 0)


def _struck(stamps: Sequence[Mapping[str, Any]], planned: Planned) -> list[Fault]:
    marks = {(stamp["rank"], stamp["phase"], stamp["kind"]) for stamp in stamps}
    return [fault for fault in planned.faults if (fault.rank, fault.phase, fault.kind) in marks]


def newest_finished(job: Job, report: Mapping[str, Any], restart: int) -> int:
    """The newest step that any rank has finished: by the records, by the boards, and inside the incident."""
    records = [line for found in job.records().values() for line in found]
    steps: list[int] = [line["iteration"] for line in records if line["restart"] == restart]
    for event in report["events"]:
        words = {"fault-noticed": "after step ", "frozen": "after step ", "through-the-door": "step "}
        _, found, number = event["data"].get("detail", "").rpartition(words.get(event["type"], "\0"))
        steps += [int(number)] if found and number.isdigit() else []
    return max(steps, default=0)


def checkpoint_problems(save: Path, step: int | None, unfinished: bool = False) -> list[str]:
    """What is wrong in the save folder, where `step` is the newest checkpoint.

    unfinished  rank 0's node is lost: nobody else removes its regular save before the next start
    """
    problems = []
    if tracked_step(save) != step:
        problems.append(f"the tracker says {tracked_step(save)}, step {step} was saved")
    problems += manifest.defects(save / naming.final_name(step)) if step is not None else []
    # The agent tidies up once every worker is gone, a moment after its report; a restart takes longer.
    deadline = time.monotonic() + TIDY_S
    while (strange := _strange(save, unfinished)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return problems + [f"{name} is left behind" for name in strange]


def _strange(save: Path, unfinished: bool) -> list[str]:
    names = [path.name for path in save.iterdir() if naming.step_of(path.name) is None]
    known = (naming.TRACKER, naming.LEASE)  # the lease of a ttprun that was killed
    return [name for name in names if name not in known and not (unfinished and "saving" in name)]


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


def fault_table(incidents: Sequence[Incident], planned: Sequence[Planned]) -> str:
    """Survived / explained / not run: a column for each kind of fault, a line for each phase."""
    left = _left(incidents, planned)
    return _table(
        "the fault strikes",
        {phase: PHASES[phase] for phase in CHOICE},
        list(KINDS),
        [(one.phase, one.kind, one) for one in incidents],
        [(one.fault.phase, one.kind) for one in left],
        times=True,
    )


def second_table(incidents: Sequence[Incident], planned: Sequence[Planned]) -> str:
    """The same, of the second faults."""
    left = [one.second for one in _left(incidents, planned) if one.second is not None]
    return _table(
        "the second fault strikes",
        {phase: PHASES[phase] for phase in IN_AN_INCIDENT},
        list(dict.fromkeys(SECOND)),
        [(one.second[1], one.second[0], one) for one in incidents if one.second is not None],
        [(fault.phase, fault.kind) for fault in left],
    )


def cut_table(incidents: Sequence[Incident], planned: Sequence[Planned], equal: Mapping[str, int]) -> str:
    """The same by layout, and how many of its records were compared."""
    left = Counter(one.cut for one in _left(incidents, planned))
    rows = [
        [name, CUTS[name].words, _cell([one for one in incidents if one.cut == name], left[name]), count]
        for name, count in ((name, equal.get(name, 0)) for name in CUTS)
        if any(one.cut == name for one in planned)
    ]
    return table(["layout", "", "incidents", "records as in the reference"], rows)


def _left(incidents: Sequence[Incident], planned: Sequence[Planned]) -> list[Planned]:
    done = {one.number for one in incidents}
    return [one for one in planned if one.number not in done]


def _table(
    head: str,
    lines: Mapping[str, str],
    kinds: Sequence[str],
    run: Sequence[tuple[str, str, Incident]],
    left: Sequence[tuple[str, str]],
    *,
    times: bool = False,
) -> str:
    """`lines` are phases and their words; `run` and `left`: phase and kind of what was run, and was not."""
    columns = [kind for kind in kinds if any(kind == one[1] for one in (*run, *left))]

    def cells(phases: Collection[str]) -> list[str]:
        here = [one for one in run if one[0] in phases]
        more = Counter(kind for phase, kind in left if phase in phases)
        found = [_cell([one for _, kind, one in here if kind == name], more[name]) for name in columns]
        found.append(_cell([one for _, _, one in here], more.total()))
        good = [one.published_s for _, _, one in here if one.published_s]
        median = f"{1000 * statistics.median(good):.0f}" if good else "–"
        return [*found, median] if times else found

    last = ["fault to published, ms"] if times else []
    return table(
        [head, *columns, "all", *last],
        [*([words, *cells({phase})] for phase, words in lines.items()), ["all", *cells(lines)]],
    )


def _cell(incidents: Sequence[Incident], left: int) -> str:
    """Survived / explained / not run."""
    if not incidents and not left:
        return "–"
    count = Counter(one.outcome for one in incidents)
    failed = f", {count[FAILED]} {FAILED}" if count[FAILED] else ""
    return f"{count[SURVIVED]} / {count[EXPLAINED]} / {left}{failed}"
