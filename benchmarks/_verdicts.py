"""What became of the faults of a campaign: an incident judged, records compared, the table, the page."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import table
from _job import Job, first

from adaptor.checkpoint import manifest, naming
from adaptor.checkpoint.publish import tracked_step
from tests.faults.fault import KINDS, PHASES, Fault

# Those of a step and of a regular save; the rest are of another test: before there is anything to save, and
# inside the save of an earlier fault.
CHOICE = tuple(phase for phase in PHASES if phase not in ("start", "copy", "dump", "dump-write"))
TIDY_S = 2.0


@dataclass(frozen=True)
class Incident:
    """One fault and what became of it; `problems` is empty when it was survived as promised."""

    number: int
    fault: str
    kind: str
    phase: str
    rank: int
    step: int
    saved: int
    published_s: float
    problems: tuple[str, ...]


def judge(job: Job, report: Mapping[str, Any], number: int, fault: Fault, save: Path, known: int) -> Incident:
    """Whether an incident went as promised.

    Args:
        report: the newest incident report of `job`, of its generation `known` (from 0).
        fault: what was to happen in that generation; `number` is its place in the campaign.
        save: the folder of checkpoints, as the incident has left it.
    """
    noticed = first(report, "fault-noticed")
    stamps = [stamp for stamp in job.struck() if stamp["time"] <= noticed]
    problems = []
    if len(stamps) != known + 1:
        problems.append(f"no fault of ours: {report['reason']}")
    saved = int(report["step"])
    if report["verdict"] != "saved":
        problems.append(str(report["reason"]))
    else:
        problems += checkpoint_problems(save, saved)
        finished = newest_finished(job, report)
        if saved != finished:
            problems.append(f"step {finished} is finished, step {saved} is saved")
    published = [event["t"] for event in report["events"] if event["what"] == "published"]
    return Incident(
        number=number,
        fault=f"{fault.kind} of rank {fault.rank}, step {fault.step}, {fault.phase}",
        kind=fault.kind,
        phase=fault.phase,
        rank=fault.rank,
        step=fault.step or 0,
        saved=saved,
        published_s=published[0] - stamps[-1]["time"] if published and stamps else 0.0,
        problems=tuple(problems),
    )


def newest_finished(job: Job, report: Mapping[str, Any]) -> int:
    """The newest step that any rank has finished: by the records, by the boards, and inside the incident."""
    steps: list[int] = [line["iteration"] for found in job.records().values() for line in found]
    for event in report["events"]:
        words = {"fault-noticed": "after step ", "frozen": "after step ", "through-the-door": "step "}
        before, found, number = event["detail"].rpartition(words.get(event["what"], "\0"))
        steps += [int(number)] if found and before is not None else []
    return max(steps)


def checkpoint_problems(save: Path, step: int) -> list[str]:
    """What is wrong in the save folder after `step` was published."""
    problems = []
    if tracked_step(save) != step:
        problems.append(f"the tracker says {tracked_step(save)}, step {step} was saved")
    problems += manifest.verify(save / naming.final_name(step))
    # The agent tidies up once every worker is gone, a moment after its report; a restart takes longer.
    deadline = time.monotonic() + TIDY_S
    while (strange := _strange(save)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return problems + [f"{name} is left behind" for name in strange]


def _strange(save: Path) -> list[str]:
    names = [path.name for path in save.iterdir() if naming.step_of(path.name) is None]
    return [name for name in names if name != naming.TRACKER]


def compare(undisturbed: Job, jobs: Sequence[Job], incidents: Iterable[Incident]) -> tuple[int, list[str]]:
    """How many records of `jobs` are those of the undisturbed run, bit for bit, and what is wrong."""
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
    # A step that was finished while its incident was open: no rank lived on to record it.
    saved = {incident.saved for incident in incidents}
    missing = {step for _, step in known.keys() - seen if step not in saved}
    return equal, problems + [f"step {step} was not recorded on every rank" for step in sorted(missing)]


def fault_table(incidents: Sequence[Incident]) -> str:
    """Survived of struck, a column for each kind of fault, a line for each phase."""
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in incidents)]
    struck = Counter((one.phase, one.kind) for one in incidents)
    survived = Counter((one.phase, one.kind) for one in incidents if not one.problems)

    def of(phases: Sequence[str]) -> list[str]:
        cells = []
        for kind in kinds:
            all_of = sum(struck[phase, kind] for phase in phases)
            cells.append(f"{sum(survived[phase, kind] for phase in phases)} of {all_of}" if all_of else "–")
        times = [one.published_s for one in incidents if one.phase in phases and not one.problems]
        return [*cells, f"{1000 * statistics.median(times):.0f}" if times else "–"]

    rows = [[phase, PHASES[phase], *of([phase])] for phase in CHOICE]
    return table(
        ["phase", "the fault strikes", *kinds, "fault to published, ms"], [*rows, ["all", "", *of(CHOICE)]]
    )


def page(where: str, command: str, text: str, summary: Sequence[str]) -> str:
    """The page for docs/."""
    what = (
        "Data-parallel processes train a tiny GPT with Megatron-LM's `pretrain_gpt.py` under `ttprun`.\n"
        "Each generation of them is hit by one fault, at a random rank, step and phase, and the next goes\n"
        "on. After each, the newest finished step must be saved, the tracker must name it, and every file\n"
        "must be what the manifest says. Every loss and grad norm of every rank is compared, bit for bit,\n"
        "with a run of the unmodified framework without faults."
    )
    parts = [
        "# A campaign of random faults",
        what,
        f"    {command}",
        f"On {where}, {time.strftime('%Y-%m-%d')}.",
        text,
        "\n".join(f"- {line}" for line in summary),
    ]
    return "\n\n".join(parts) + "\n"
