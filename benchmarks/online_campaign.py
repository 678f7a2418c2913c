"""Random faults with online recovery armed; `--write benchmarks/results/campaigns.md` writes a section of
that page.

Jobs of many layouts train under `ttprun --ttp-online 60`. Each job gets several faults, one after another: of
a random kind, on a random rank, in a random phase of a random step; some are followed by a second fault in
the same recovery, in a survivor or in the new process. Every job must reach its last step, every loss and
grad norm of every rank and the last checkpoint must equal those of the unmodified framework under plain
torchrun, bit for bit; no process of the job may remain.

An interrupted campaign continues when it is started again with the same settings: finished jobs are not
repeated.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import _second_faults
from _bench import OUT, ROOT, Benchmark, argument_parser
from _job import Job, JobError, run
from _online import (
    ALL,
    FAILED,
    KINDS,
    LAYOUTS,
    OUTCOMES,
    STEPS,
    Drawn,
    Incident,
    differences,
    draw,
    incidents,
)
from _online_page import WHAT, section, tables_of
from _pages import heading
from _schedule import SAVE_INTERVAL

from adaptor.checkpoint import manifest
from adaptor.protocol import naming
from tests import waiting
from tests.faults import leftovers, same
from tests.pages import write_section

# A job of which nothing moves for so long stands still: more than 15 times TTP_HANG, the limit for the first
# step of a new process, and TTP_OT.
SILENCE_S = 360.0
TICK_S = 0.1
OPTIONS = ["--ttp-hang", "8", "--ttp-ot", "60"]
# The limit without progress in a campaign of second faults, where many a process hangs: half of it, after
# which a new process is replaced, is more than the 10 s after which a main thread hangs (`UNWIND_S`).
SECOND_FAULTS_S = 32
RESTARTS = 8


def make_job(folder: Path, cut: str, index: Path, *, adaptor: bool, **settings: Any) -> Job:
    """Return a job of a layout; without the adaptor, the undisturbed run."""
    layout, library = ALL[cut].layout, ALL[cut].library
    return Job(
        folder,
        adaptor=adaptor,
        train_iters=STEPS,
        ranks=layout.processes,
        tp=layout.tp,
        precision=layout.precision,
        distributed=layout.distributed_optimizer,
        instances=2 if layout.reference else 1,
        save_interval=SAVE_INTERVAL,
        extra=[*layout.arguments, "--data-cache-path", str(index)],
        warm=True,
        library=library,
        **settings,
    )


def reference(folder: Path, cut: str) -> Job:
    """Return the undisturbed run of a layout by the unmodified framework; an earlier run is reused."""
    job = make_job(folder / cut / "reference", cut, folder / cut / "index", adaptor=False)
    marker = job.folder / "done"
    if not marker.exists():
        shutil.rmtree(job.folder, ignore_errors=True)
        with job:
            if job.wait(1800.0) != 0:
                raise JobError(f"the undisturbed run failed: see {job.log}")
        marker.touch()
    return job


def fight(folder: Path, drawn: Drawn, online_s: int) -> dict[str, Any]:
    """Run one job, or read the result of an earlier run; `incidents` and `problems`."""
    place = folder / drawn.cut / f"job-{drawn.number}"
    result = place / "result.json"
    if result.exists():
        kept: dict[str, Any] = json.loads(result.read_text())
        return kept
    shutil.rmtree(place, ignore_errors=True)
    undisturbed = reference(folder, drawn.cut)
    # One that was cut off while it was written would be taken for whole.
    index = place / "index"
    mark = uuid.uuid4().hex
    job = make_job(
        place,
        drawn.cut,
        index,
        adaptor=True,
        launcher=[
            *OPTIONS,
            *("--ttp-online", str(online_s)),
            *ALL[drawn.cut].launcher,
            *("--ttp-spares", str(drawn.spares), "--max-restarts", str(RESTARTS)),
        ],
        faults=drawn.faults,
        environment={leftovers.MARK: mark},
    )
    began, problems = time.monotonic(), list[str]()
    with job:
        try:
            code = _follow(job)
            problems += [f"exit code {code}"] if code else []
        except JobError as error:
            problems.append(str(error))
            _stacks(place, mark)
    try:
        waiting.ended(leftovers.processes(mark))
    except AssertionError as error:
        problems += [] if problems else [str(error)]
    leftovers.end(mark)
    incidents_of_job = incidents(drawn, job)
    problems += [
        f"{incident.why}: {'; '.join(incident.struck)}"
        for incident in incidents_of_job
        if incident.outcome == FAILED
    ]
    if not problems:
        problems += differences(
            undisturbed, job, {incident.step + offset for incident in incidents_of_job for offset in (0, 1)}
        )
        problems += _checkpoint_problems(undisturbed, job) if ALL[drawn.cut].library is None else []
    struck = {stamp["fault"] for stamp in job.struck()}
    outcome = {
        "number": drawn.number,
        "cut": drawn.cut,
        "incidents": [asdict(incident) for incident in incidents_of_job],
        "missed": [str(fault) for fault in drawn.faults if str(fault) not in struck],
        "records": sum(map(len, job.records().values())),
        "seconds": time.monotonic() - began,
        "problems": [f"{place.relative_to(ROOT)}: {problem}" for problem in problems],
    }
    if not problems:
        shutil.rmtree(job.save)
    result.write_text(json.dumps(outcome, indent=1))
    return outcome


def _follow(job: Job) -> int:
    """Return the exit code of a job; raises JobError where nothing of it moves any more."""
    size, moved = -1, time.monotonic()
    while (code := job.returncode) is None:
        size_now = (
            sum(path.stat().st_size for path in job.folder.glob("records/*.jsonl")) + job.log.stat().st_size
        )
        if size_now != size:
            size, moved = size_now, time.monotonic()
        if time.monotonic() - moved > SILENCE_S:
            raise JobError(f"nothing has moved for {SILENCE_S:g} s")
        time.sleep(TICK_S)
    return code


def _stacks(place: Path, mark: str) -> None:
    """Write down where the processes of a job stand."""
    tool = Path(sys.executable).with_name("py-spy")
    with (place / "stacks").open("wb") as sink:
        for process in leftovers.processes(mark):
            subprocess.run(
                [str(tool), "dump", "--native", "--nonblocking", "--pid", str(process)],
                stdout=sink,
                stderr=sink,
                check=False,
            )


def _checkpoint_problems(undisturbed: Job, job: Job) -> list[str]:
    name = naming.final_name(STEPS)
    own, expected = job.save / name, undisturbed.save / name
    if not own.exists():
        return [f"there is no {name}"]
    # The framework sets these where it loads a checkpoint, and each job has a folder of its own.
    of_the_job = ("args./load: ", "args./iteration: ", "args./num_floating_point_operations_so_far: ")
    differing = [
        line for line in same.differences(own, expected) if not any(name in line for name in of_the_job)
    ]
    strange = [path.name for path in job.save.iterdir() if naming.step_of(path.name) is None]
    differing += [f"{name} is left behind" for name in strange if name not in (naming.TRACKER, naming.LEASE)]
    return [*manifest.defects(own), *differing]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--incidents", type=int, default=60, help="stop when there were so many")
    parser.add_argument("--seed", type=int, default=20261123)
    usual = [kind for kind, weight in KINDS.items() for _ in range(weight)]
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=usual, help="named twice: twice as often"
    )
    parser.add_argument("--layouts", nargs="+", choices=ALL)
    parser.add_argument(
        "--second-faults",
        action="store_true",
        help="each first fault is followed by a second one, in any phase of the recovery",
    )
    parser.add_argument(
        "--struck",
        nargs="+",
        choices=_second_faults.WHO,
        default=list(_second_faults.WHO),
        help="with --second-faults: the parts that are struck",
    )
    parser.add_argument("--second", type=float, default=0.35, help="the share with a second fault")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables as a page")
    options = parser.parse_args()
    usual_layouts = list(_second_faults.CUTS if options.second_faults else LAYOUTS)
    options.layouts = options.layouts or usual_layouts
    second = "--second-faults" if options.second_faults else f"--second {options.second:g}"
    option_texts = [f"--incidents {options.incidents} --seed {options.seed} {second}"]
    option_texts += [f"--kinds {' '.join(options.kinds)}"] if options.kinds != usual else []
    option_texts += [f"--layouts {' '.join(options.layouts)}"] if options.layouts != usual_layouts else []
    option_texts += (
        [f"--struck {' '.join(options.struck)}"] if options.struck != list(_second_faults.WHO) else []
    )
    settings = " ".join(option_texts)
    benchmark = Benchmark("online_campaign", {"settings": settings})
    drawn_by = hashlib.sha256(" ".join([*option_texts[1:], f"{options.seed} {second}"]).encode())
    folder = OUT / f"online-{options.seed}-{drawn_by.hexdigest()[:8]}"
    results: list[dict[str, Any]] = []
    incidents_so_far: list[Incident] = []
    online_s, jobs = 60, draw(options.seed, options.layouts, options.second, options.kinds)
    if options.second_faults:
        online_s, jobs = SECOND_FAULTS_S, _second_faults.draw(options.seed, options.layouts, options.struck)
    for drawn in itertools.islice(jobs, 10_000):
        if len(incidents_so_far) >= options.incidents:
            break
        incident = fight(folder, drawn, online_s)
        results.append(incident)
        of_this_job = [
            Incident(**{**stored, "struck": tuple(stored["struck"])}) for stored in incident["incidents"]
        ]
        incidents_so_far += of_this_job
        count = Counter(incident.outcome for incident in of_this_job)
        print(
            f"{len(incidents_so_far)}/{options.incidents} {drawn.cut}: "
            + ", ".join(f"{count[name]} {name}" for name in OUTCOMES if count[name])
            + f", {incident['seconds']:.0f} s"
            + "".join(
                f"\n  {incident.outcome}: {incident.why}; {'; '.join(incident.struck)}"
                for incident in of_this_job
                if incident.why
            )
            + "".join(f"\n  PROBLEM {problem}" for problem in incident["problems"]),
            flush=True,
        )
    problems = [problem for incident in results for problem in incident["problems"]]
    tables, summary = tables_of(incidents_so_far, results)
    introduction, title = WHAT, heading(options.kinds, ", recovered online")
    if options.second_faults:
        tables = [_second_faults.outcome_table(incidents_so_far), *tables[2:]]
        introduction, title = _second_faults.WHAT, "Second faults in an online recovery"
    benchmark.finish("\n\n".join([*tables, *summary]), {"jobs": results, "problems": problems})
    if options.write:
        command = f"python benchmarks/online_campaign.py {settings} --write {options.write}"
        text = section(benchmark.where, command, tables, summary, introduction)
        write_section(options.write, title, text)
    if problems:
        raise JobError(f"{len(problems)} problems")


if __name__ == "__main__":
    run(main)
