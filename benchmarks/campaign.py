"""Random faults, one after another: `python benchmarks/campaign.py --write benchmarks/results/campaigns.md`.

Every generation of the workers of a job gets one fault: of a random kind, on a random rank, in a random phase
of a random step; some faults take a whole node, or cut the network between two nodes. Often a second fault
strikes in the same incident. After each incident the newest finished step must be saved, the tracker must
name the step, and every file must match the manifest; if too many ranks are lost, the reason must say so, and
nothing else may have changed. At the end every loss and grad norm of every rank and step must equal, bit for
bit, the values of the unmodified framework under plain torchrun, in a run without faults.

Jobs of several layouts take turns. A campaign that was interrupted, or ended by --minutes, continues when it
is started again with the same seed and settings.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _bench import OUT, ROOT, Benchmark, argument_parser
from _job import Job, JobError, run
from _layouts import CUTS
from _pages import heading, section
from _schedule import KINDS, SAVE_INTERVAL, Planned, schedule
from _verdicts import OUTCOMES, compare, cut_table, fault_table, second_table
from _watcher import Campaign, Watcher

from adaptor.checkpoint.tracker import tracked_step
from tests.faults import cgroups, namespaces
from tests.faults.namespaces import Namespaces
from tests.pages import write_section

# So many incidents of a layout before the next layout has its turn: a start of ttprun is worth a second.
ROUND = 10
TICK_S = 0.05
# Longer than a step takes beside all that the machine does; and the shortest that leaves a dump time.
OPTIONS = ["--ttp-hang", "8", "--ttp-ot", "20"]


class Turns:
    """Distributes the layouts among threads: at most one thread runs a layout.

    Args:
        limit: so many successive starts without an incident are too many.
        until: the time to stop, monotonic seconds.
    """

    def __init__(self, campaign: Campaign, limit: int, until: float) -> None:
        self._campaign = campaign
        self._limit = limit
        self._until = until
        self._barren = 0
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self.stop = threading.Event()

    @property
    def over(self) -> bool:
        return self.stop.is_set() or time.monotonic() >= self._until or self._barren >= self._limit

    def take(self) -> str | None:
        """Return a free layout; None if there is no such layout, or at the end of the campaign."""
        with self._lock:
            cut = None if self.over else self._campaign.next_layout(self._busy)
            if cut is not None:
                self._busy.add(cut)
            return cut

    def give(self, cut: str, incidents: int) -> None:
        with self._lock:
            self._busy.discard(cut)
            self._barren = 0 if incidents else self._barren + 1


def fight(campaign: Campaign, turns: Turns, workers: int) -> None:
    """Run jobs, `workers` side by side, until no fault is left or it is time to stop."""
    with contextlib.ExitStack() as stack:
        group = ""
        with contextlib.suppress(OSError):  # else the same signal is used
            group = str(stack.enter_context(cgroups.too_little_memory()))
        # A thread for each: what an incident has left must be looked at before the next one opens.
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        stack.callback(turns.stop.set)
        for thread in [pool.submit(_fight, campaign, turns, group) for _ in range(workers)]:
            thread.result()
        if turns.over:
            print("it is time to stop, or the last starts were without an incident")


def _fight(campaign: Campaign, turns: Turns, group: str) -> None:
    while (cut := turns.take()) is not None:
        fight = Fight(campaign, cut, group)
        try:
            while not turns.over and fight.goes_on():
                time.sleep(TICK_S)
        finally:
            fight.close()
            turns.give(cut, fight.incidents)


class Fight:
    """One start of ttprun for a layout, with faults for each of its generations."""

    def __init__(self, campaign: Campaign, cut: str, group: str) -> None:
        self._planned = len(campaign.remaining(cut))
        self._campaign, self._cut = campaign, cut
        with contextlib.ExitStack() as stack:
            network = None
            if CUTS[cut].nodes > 1 and namespaces.permitted():
                network = stack.enter_context(namespaces.two())
            self._job, planned = new_job(campaign, cut, group, network)
            self._watcher = Watcher(campaign, self._job, planned)
            stack.enter_context(self._job)
            self._stack = stack.pop_all()

    @property
    def incidents(self) -> int:
        return self._planned - len(self._campaign.remaining(self._cut))

    def goes_on(self) -> bool:
        """Check the job; return False once it is closed."""
        try:
            if self._watcher.tick():
                return True
            if self._job.returncode is not None:
                print(f"ttprun ended with exit code {self._job.returncode}: {self._job.log}", flush=True)
        except JobError as error:
            print(error, flush=True)
        self.close()
        return False

    def close(self) -> None:
        self._stack.close()


def new_job(
    campaign: Campaign, cut: str, group: str, network: Namespaces | None
) -> tuple[Job, list[Planned]]:
    """Return the next start of ttprun for a layout, and the planned incident of each of its generations."""
    # One that was cut off while it was written would be taken for whole.
    shutil.rmtree(campaign.folder / cut / "index", ignore_errors=True)
    base = tracked_step(campaign.save(cut)) or 1
    planned: list[Planned] = []
    for restart, incident in enumerate(campaign.remaining(cut)[:ROUND]):
        planned.append(incident.at(base, restart))
        base = planned[-1].fault.step or base
    folder = campaign.folder / cut / f"job-{len(campaign.jobs(cut))}"
    job = _job(
        campaign,
        cut,
        folder,
        adaptor=True,
        save=campaign.save(cut),
        save_interval=SAVE_INTERVAL,
        launcher=[*OPTIONS, *CUTS[cut].launcher, "--max-restarts", str(len(planned))],
        faults=[fault for struck in planned for fault in struck.faults],
        nodes=CUTS[cut].nodes,
        network=network,
        environment={cgroups.MEMORY: group} if group else {},
    )
    return job, planned


def _job(campaign: Campaign, cut: str, folder: Path, *, extra: Sequence[str] = (), **settings: Any) -> Job:
    layout = CUTS[cut].layout
    index = campaign.folder / cut / "index"
    return Job(
        folder,
        train_iters=campaign.train_iters(cut),
        ranks=layout.processes,
        tp=layout.tp,
        distributed=layout.distributed_optimizer,
        instances=2 if layout.reference else 1,
        extra=[*layout.arguments, "--data-cache-path", str(index), *extra],
        warm=True,
        **settings,
    )


def reference(campaign: Campaign, cut: str, steps: int) -> Job:
    """Return a run of the unmodified framework over at least so many steps; an earlier run is reused."""
    steps += -steps % 50
    job = _job(
        campaign,
        cut,
        campaign.folder / cut / f"reference-{steps}",
        adaptor=False,
        extra=["--exit-interval", str(steps)],
    )
    marker = job.folder / "done"
    if not marker.exists():
        shutil.rmtree(job.folder, ignore_errors=True)
        print(f"reference of {cut}: {steps} steps of the unmodified framework", flush=True)
        with job:
            code = job.wait(3600.0)
        if code != 0:
            raise JobError(f"the reference ended with exit code {code}: see {job.log}")
        marker.touch()
    return job


def check_records(campaign: Campaign) -> tuple[dict[str, int], list[str]]:
    """Return, by layout, the number of records that equal the reference's bit for bit, and all problems."""
    equal: dict[str, int] = {}
    problems = []
    for cut in CUTS:
        jobs = [_job(campaign, cut, path, adaptor=True) for path in campaign.jobs(cut)]
        steps = [line["iteration"] for job in jobs for lines in job.records().values() for line in lines]
        if steps:
            saved = [
                report["step"] for job in jobs for report in job.incidents() if report["step"] is not None
            ]
            equal[cut], differences = compare(reference(campaign, cut, max(steps)), jobs, saved)
            problems += [f"{cut}: {problem}" for problem in differences]
    return equal, problems


def main() -> None:
    parser = argument_parser(__doc__)
    usual = [kind for kind, weight in KINDS.items() for _ in range(weight)]
    parser.add_argument("--incidents", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=20250101)
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, help="one that is named twice comes twice as often"
    )
    # An incident costs a second of a processor for each process that starts again.
    layouts = [name for name, cut in CUTS.items() for _ in range(6 // cut.ranks)]
    parser.add_argument("--layouts", nargs="+", choices=CUTS, default=layouts, help="as for kinds")
    parser.add_argument("--second", type=float, default=0.35, help="the share with a second fault")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long; go on later")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the tables as a page")
    parser.add_argument("--workers", type=int, default=1, help="so many jobs run side by side")
    parser.add_argument("--tries", type=int, default=3, help="starts of ttprun in a row without an incident")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    option_texts = [f"--incidents {options.incidents} --seed {options.seed} --second {options.second:g}"]
    option_texts += [f"--kinds {' '.join(options.kinds)}"] if options.kinds else []
    option_texts += [f"--layouts {' '.join(options.layouts)}"] if options.layouts != layouts else []
    settings = " ".join(option_texts)
    benchmark = Benchmark("campaign", {"settings": settings})
    planned = list(
        schedule(options.seed, options.incidents, options.kinds or usual, options.layouts, options.second)
    )
    if any(incident.kind == "cut" for incident in planned) and not namespaces.permitted():
        raise JobError(
            "the kind `cut` needs network namespaces, which this user may not make here: name the --kinds, "
            "without it"
        )
    # What was run for another schedule is none of this one.
    drawn = hashlib.sha256("\n".join(map(repr, planned)).encode()).hexdigest()[:8]
    folder = OUT / f"campaign-{options.seed}-{drawn}"
    campaign = Campaign(folder, planned)
    if campaign.incidents:
        print(f"going on after {len(campaign.incidents)} incidents in {folder.relative_to(ROOT)}", flush=True)
    fight(campaign, Turns(campaign, options.tries, until), options.workers)
    equal, problems = check_records(campaign)

    incidents = campaign.incidents
    count = {outcome: sum(incident.outcome == outcome for incident in incidents) for outcome in OUTCOMES}
    problems += [f"{incident.fault}: {problem}" for incident in incidents for problem in incident.problems]
    minutes, each_s = campaign.seconds / 60, campaign.seconds / max(1, len(incidents))
    starts = sum(len(campaign.jobs(cut)) for cut in CUTS)
    summary = [
        f"{len(incidents)} of {options.incidents} incidents: "
        + ", ".join(f"{number} {outcome}" for outcome, number in count.items())
        + f"; a second fault struck in {sum(incident.second is not None for incident in incidents)} of them.",
        f"{sum(equal.values())} records (loss, grad norm) are bit for bit those of the unmodified framework.",
        f"{minutes:.0f} minutes, {each_s:.1f} s per incident with its restart; starts of ttprun: {starts}.",
    ]
    summary += [f"PROBLEM: {problem}" for problem in problems]
    tables = [
        fault_table(incidents, planned),
        second_table(incidents, planned),
        cut_table(incidents, planned, equal),
    ]
    succeeded = len(incidents) == options.incidents and not problems
    benchmark.finish(
        "\n\n".join([*tables, "\n".join(summary)]),
        {
            "incidents": [asdict(incident) for incident in incidents],
            "problems": problems,
            "reached": succeeded,
        },
    )
    if options.write:
        command = f"python benchmarks/campaign.py {settings} --write {options.write}"
        text = section(benchmark.where, command, tables, summary)
        write_section(options.write, heading(options.kinds or usual), text)
    if not succeeded:
        raise JobError(f"{len(incidents)} of {options.incidents} incidents, {len(problems)} problems")


if __name__ == "__main__":
    run(main)
