"""The outcomes of a campaign's faults: judges incidents, compares records, and makes the tables."""

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

# Seconds until an agent has tidied up, after its workers have ended.
TIDY_S = EXIT_GRACE_S + SHUTDOWN_GRACE_S + 2.0
UNHELD = ("has no live holder", "nobody is left who can write")
BEHIND = "was not finished on every rank"
SURVIVED, EXPLAINED, FAILED = OUTCOMES = ("survived", "explained", "failed")
LEFT = "not run"


@dataclass(frozen=True)
class Incident:
    """An incident and its outcome.

    Attributes:
        kind: the kind in the schedule's terms.
        second: kind and phase of the second fault, if it struck.
        saved: the newest step of the last words; -1: there are none.
        outcome: survived: the newest finished step is saved; explained: it could not be, the last line says
            why, and nothing was harmed; failed: anything else, see `problems`.
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
    """The result of an incident on the side of one controller; `saved` is -1 if nothing was saved."""

    saved: int
    published: float | None
    problems: list[str]


def judge(job: Job, reports: Sequence[Mapping[str, Any]], planned: Planned) -> Incident:
    """Judge an incident by its reports and by the save folder.

    Args:
        job: the job.
        reports: the report, or that of each side if the network was cut.
        planned: the faults of the incident.
    """
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
        problems += [f"node {node} has no report of the cut" for node in sorted(silent)]
    saved = max(side.saved for side in sides)
    lost_node_0 = planned.fault in struck and planned.kind == "controller-sigkill"
    problems += checkpoint_problems(job.save, saved if saved >= 0 else tracked_step(job.save), lost_node_0)
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
    # A rank that is lost after it reported its files as written has given everything that it had.
    writers = {event.get("rank") for event in report["events"] if event["type"] == "written"}
    effective_faults = [
        fault for fault in struck if fault.phase != "dump-written" or fault.rank not in writers
    ]
    survives = CUTS[planned.cut].survives(effective_faults, side)
    problems: list[str] = []
    if report["verdict"] == "saved":
        finished = newest_finished(job, report, planned.fault.restart)
        is_behind = survives is None or (CUTS[planned.cut].local_copy and saved == finished - 1)
        if saved < finished and not (is_behind and BEHIND in reason):
            problems.append(f"step {finished} is finished, step {saved} is saved: {reason}")
        if survives is False and not _was_found(report):
            problems.append("saved, and no holder should have been left")
        published = [unix(event["time"]) for event in report["events"] if event["type"] == "published"]
        return _Side(saved, published[0] if published else None, problems)
    if report["verdict"] != "lost" or survives or not any(fragment in reason for fragment in UNHELD):
        problems.append(reason)
    return _Side(-1, None, problems)


def _was_found(report: Mapping[str, Any]) -> bool:
    """Return whether the step was already in the save folder, which agents search if no holder is left.

    The other side of a cut has written the step, an earlier controller, or the framework's own save.
    """
    types = {event["type"] for event in report["events"]}
    return "find-ordered" in types and "publish-ordered" not in types


def side_of(report: Mapping[str, Any]) -> int:
    """Return the node whose controller has written the report."""
    return next((int(event["node"]) for event in report["events"] if event["type"] == "took-over"), 0)


def _struck(stamps: Sequence[Mapping[str, Any]], planned: Planned) -> list[Fault]:
    marks = {(stamp["rank"], stamp["phase"], stamp["kind"]) for stamp in stamps}
    return [fault for fault in planned.faults if (fault.rank, fault.phase, fault.kind) in marks]


def newest_finished(job: Job, report: Mapping[str, Any], restart: int) -> int:
    """Return the newest step that any rank has finished, by records, by boards, and inside the incident."""
    records = [line for of_rank in job.records().values() for line in of_rank]
    steps: list[int] = [line["iteration"] for line in records if line["restart"] == restart]
    for event in report["events"]:
        prefixes = {"fault-noticed": "after step ", "frozen": "after step ", "through-the-door": "step "}
        _, separator, number = event["data"].get("detail", "").rpartition(prefixes.get(event["type"], "\0"))
        steps += [int(number)] if separator and number.isdigit() else []
    return max(steps, default=0)


def checkpoint_problems(save: Path, step: int | None, unfinished: bool = False) -> list[str]:
    """Return the problems of the save folder, whose newest checkpoint must be `step`.

    Args:
        unfinished: rank 0's node is lost, so its regular save stays until the next start.
    """
    problems = []
    if tracked_step(save) != step:
        problems.append(f"the tracker says {tracked_step(save)}, step {step} was saved")
    problems += manifest.defects(save / naming.final_name(step)) if step is not None else []
    # The agent tidies up a moment after its report, when every worker has ended; a restart takes longer.
    deadline = time.monotonic() + TIDY_S
    while (unexpected := _unexpected(save, unfinished)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return problems + [f"{name} is left behind" for name in unexpected]


def _unexpected(save: Path, unfinished: bool) -> list[str]:
    names = [path.name for path in save.iterdir() if naming.step_of(path.name) is None]
    expected = (naming.TRACKER, naming.LEASE)  # the lease of a ttprun that was killed
    return [name for name in names if name not in expected and not (unfinished and "saving" in name)]


def compare(undisturbed: Job, jobs: Sequence[Job], saved: Iterable[int]) -> tuple[int, list[str]]:
    """Compare the records of `jobs` with those of the undisturbed run, bit for bit.

    Args:
        undisturbed: the undisturbed run.
        jobs: the jobs.
        saved: the steps of last words: a step that was finished in an open incident has no record.

    Returns:
        The number of equal records, and the problems.
    """
    expected = {
        (rank, line["iteration"]): (line["losses"], line["grad_norm"])
        for rank, records in undisturbed.records().items()
        for line in records
    }
    equal, problems, compared = 0, [], set()
    for job in jobs:
        for rank, records in job.records().items():
            for line in records:
                key = (rank, line["iteration"])
                compared.add(key)
                if expected.get(key) == (line["losses"], line["grad_norm"]):
                    equal += 1
                else:
                    problems.append(f"rank {rank}, step {line['iteration']}: not as in the reference")
    saved_steps = set(saved)
    newest = max(saved_steps, default=0)
    missing = {step for _, step in expected.keys() - compared if step not in saved_steps and step < newest}
    return equal, problems + [f"step {step} was not recorded on every rank" for step in sorted(missing)]


def fault_table(incidents: Sequence[Incident], planned: Sequence[Planned]) -> str:
    """Return the counts (survived / explained / not run) by phase (lines) and kind of fault (columns)."""
    missing = _not_run(incidents, planned)
    return _table(
        "the fault strikes",
        {phase: PHASES[phase] for phase in CHOICE},
        list(KINDS),
        [(incident.phase, incident.kind, incident) for incident in incidents],
        [(planned_incident.fault.phase, planned_incident.kind) for planned_incident in missing],
        times=True,
    )


def second_table(incidents: Sequence[Incident], planned: Sequence[Planned]) -> str:
    """Return the same counts for second faults."""
    missing = [
        planned_incident.second
        for planned_incident in _not_run(incidents, planned)
        if planned_incident.second is not None
    ]
    return _table(
        "the second fault strikes",
        {phase: PHASES[phase] for phase in IN_AN_INCIDENT},
        list(dict.fromkeys(SECOND)),
        [
            (incident.second[1], incident.second[0], incident)
            for incident in incidents
            if incident.second is not None
        ],
        [(fault.phase, fault.kind) for fault in missing],
    )


def cut_table(incidents: Sequence[Incident], planned: Sequence[Planned], equal: Mapping[str, int]) -> str:
    """Return the same counts by layout, and how many of its records were compared."""
    missing = Counter(planned_incident.cut for planned_incident in _not_run(incidents, planned))
    rows = [
        [
            name,
            CUTS[name].words,
            _cell([incident for incident in incidents if incident.cut == name], missing[name]),
            count,
        ]
        for name, count in ((name, equal.get(name, 0)) for name in CUTS)
        if any(planned_incident.cut == name for planned_incident in planned)
    ]
    return table(["layout", "", "incidents", "records as in the reference"], rows)


def _not_run(incidents: Sequence[Incident], planned: Sequence[Planned]) -> list[Planned]:
    numbers = {incident.number for incident in incidents}
    return [planned_incident for planned_incident in planned if planned_incident.number not in numbers]


def _table(
    head: str,
    lines: Mapping[str, str],
    kinds: Sequence[str],
    run: Sequence[tuple[str, str, Incident]],
    missing: Sequence[tuple[str, str]],
    *,
    times: bool = False,
) -> str:
    """Return a table of counts.

    Args:
        lines: the text of each phase.
        run: phase, kind and incident of each fault that was run.
        missing: phase and kind of each fault that was not run.
    """
    columns = [kind for kind in kinds if any(kind == fault[1] for fault in (*run, *missing))]

    def cells(phases: Collection[str]) -> list[str]:
        in_phases = [(kind, incident) for phase, kind, incident in run if phase in phases]
        not_run = Counter(kind for phase, kind in missing if phase in phases)
        row = [
            _cell([planned_incident for kind, planned_incident in in_phases if kind == name], not_run[name])
            for name in columns
        ]
        row.append(_cell([incident for _, incident in in_phases], not_run.total()))
        seconds = [incident.published_s for _, incident in in_phases if incident.published_s]
        median = f"{1000 * statistics.median(seconds):.0f}" if seconds else "–"
        return [*row, median] if times else row

    last = ["fault to published, ms"] if times else []
    return table(
        [head, *columns, "all", *last],
        [*([text, *cells({phase})] for phase, text in lines.items()), ["all", *cells(lines)]],
    )


def _cell(incidents: Sequence[Incident], not_run: int) -> str:
    """Return the counts: survived / explained / not run."""
    if not incidents and not not_run:
        return "–"
    count = Counter(incident.outcome for incident in incidents)
    failed = f", {count[FAILED]} {FAILED}" if count[FAILED] else ""
    return f"{count[SURVIVED]} / {count[EXPLAINED]} / {not_run}{failed}"
