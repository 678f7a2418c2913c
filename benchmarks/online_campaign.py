"""Random faults with online recovery armed; `--write benchmarks/results/campaigns.md` writes a section there.

Jobs of many layouts train under `ttprun --ttp-online 60`. Each is hit by several faults, one after another:
of a random kind, on a random rank, in a random phase of a random step; some of them are followed by a second
one, in the recovery that the first has begun, in a survivor or in the new process. Every job has to come to
its last step, every loss and grad norm of every rank has to be bit for bit that of the unmodified framework
under plain torchrun, and so has the checkpoint at its end; nothing of it may run on.

It can be interrupted and started again with the same settings: jobs that are done are not run again.
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
    """A job of a layout; without the adaptor it is that of the undisturbed run."""
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
    """The undisturbed run of a layout by the unmodified framework; one that was made before will do."""
    job = make_job(folder / cut / "reference", cut, folder / cut / "index", adaptor=False)
    done = job.folder / "done"
    if not done.exists():
        shutil.rmtree(job.folder, ignore_errors=True)
        with job:
            if job.wait(1800.0) != 0:
                raise JobError(f"the undisturbed run failed: see {job.log}")
        done.touch()
    return job


def fight(folder: Path, drawn: Drawn, online_s: int) -> dict[str, Any]:
    """Run one job, or read what became of it; `incidents` and `problems`."""
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
    found = incidents(drawn, job)
    problems += [f"{one.why}: {'; '.join(one.struck)}" for one in found if one.outcome == FAILED]
    if not problems:
        problems += differences(undisturbed, job, {one.step + more for one in found for more in (0, 1)})
        problems += _checkpoint_problems(undisturbed, job) if ALL[drawn.cut].library is None else []
    struck = {stamp["fault"] for stamp in job.struck()}
    outcome = {
        "number": drawn.number,
        "cut": drawn.cut,
        "incidents": [asdict(one) for one in found],
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
        now = sum(path.stat().st_size for path in job.folder.glob("records/*.jsonl")) + job.log.stat().st_size
        if now != size:
            size, moved = now, time.monotonic()
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
    ours, theirs = job.save / name, undisturbed.save / name
    if not ours.exists():
        return [f"there is no {name}"]
    # The framework sets these where it loads a checkpoint, and each job has a folder of its own.
    own = ("args./load: ", "args./iteration: ", "args./num_floating_point_operations_so_far: ")
    found = [line for line in same.differences(ours, theirs) if not any(name in line for name in own)]
    strange = [path.name for path in job.save.iterdir() if naming.step_of(path.name) is None]
    found += [f"{name} is left behind" for name in strange if name not in (naming.TRACKER, naming.LEASE)]
    return [*manifest.defects(ours), *found]


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
    words = [f"--incidents {options.incidents} --seed {options.seed} {second}"]
    words += [f"--kinds {' '.join(options.kinds)}"] if options.kinds != usual else []
    words += [f"--layouts {' '.join(options.layouts)}"] if options.layouts != usual_layouts else []
    words += [f"--struck {' '.join(options.struck)}"] if options.struck != list(_second_faults.WHO) else []
    settings = " ".join(words)
    benchmark = Benchmark("online_campaign", {"settings": settings})
    drawn_by = hashlib.sha256(" ".join([*words[1:], f"{options.seed} {second}"]).encode())
    folder = OUT / f"online-{options.seed}-{drawn_by.hexdigest()[:8]}"
    done: list[dict[str, Any]] = []
    found: list[Incident] = []
    online_s, jobs = 60, draw(options.seed, options.layouts, options.second, options.kinds)
    if options.second_faults:
        online_s, jobs = SECOND_FAULTS_S, _second_faults.draw(options.seed, options.layouts, options.struck)
    for drawn in itertools.islice(jobs, 10_000):
        if len(found) >= options.incidents:
            break
        one = fight(folder, drawn, online_s)
        done.append(one)
        here = [Incident(**{**told, "struck": tuple(told["struck"])}) for told in one["incidents"]]
        found += here
        count = Counter(each.outcome for each in here)
        print(
            f"{len(found)}/{options.incidents} {drawn.cut}: "
            + ", ".join(f"{count[name]} {name}" for name in OUTCOMES if count[name])
            + f", {one['seconds']:.0f} s"
            + "".join(
                f"\n  {each.outcome}: {each.why}; {'; '.join(each.struck)}" for each in here if each.why
            )
            + "".join(f"\n  PROBLEM {problem}" for problem in one["problems"]),
            flush=True,
        )
    problems = [problem for one in done for problem in one["problems"]]
    tables, summary = tables_of(found, done)
    what, title = WHAT, heading(options.kinds, ", recovered online")
    if options.second_faults:
        tables = [_second_faults.outcome_table(found), *tables[2:]]
        what, title = _second_faults.WHAT, "Second faults in an online recovery"
    benchmark.finish("\n\n".join([*tables, *summary]), {"jobs": done, "problems": problems})
    if options.write:
        command = f"python benchmarks/online_campaign.py {settings} --write {options.write}"
        text = section(benchmark.where, command, tables, summary, what)
        write_section(options.write, title, text)
    if problems:
        raise JobError(f"{len(problems)} problems")


if __name__ == "__main__":
    run(main)
