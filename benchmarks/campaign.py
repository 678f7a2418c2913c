"""Random faults, one after another, in one job: `python benchmarks/campaign.py --write docs/campaign.md`.

Every generation of the workers gets one fault: a random rank, in a random phase of a random step, by default
a SIGKILL. After each of them the newest finished step must be saved, the tracker must name it, and every file
must be what the manifest says. At the end every loss and grad norm of every rank and every step must be bit
for bit that of the unmodified framework under plain torchrun, in a run without faults over all the steps.

It can be interrupted and started again with the same seed and settings: it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from _bench import OUT, ROOT, Benchmark
from _job import RANKS, Job, JobError, run
from _verdicts import CHOICE, Incident, compare, fault_table, judge, page

from adaptor.checkpoint.publish import tracked_step
from tests.faults.fault import KINDS, Fault

SAVE_INTERVAL = 7
# Only there does the framework reach them.
ON_RANK_0 = ("save-write", "save-tracker", "save-named")
SILENCE_S = 180.0
KEEP = 2


def schedule(seed: int, count: int, kinds: Sequence[str], ranks: int) -> list[Fault]:
    """The faults; each leaves the generation before it at least one step to finish."""
    source = random.Random(seed)
    step = 1
    faults = []
    for _ in range(count):
        phase = source.choice(CHOICE)
        rank = 0 if phase in ON_RANK_0 else source.randrange(ranks)
        step += source.randint(2, 4)
        if phase.startswith("save"):
            step += -step % SAVE_INTERVAL
        faults.append(Fault(rank=rank, phase=phase, kind=source.choice(kinds), step=step))
    return faults


class Campaign:
    """The folder of one seed: `state.json`, the checkpoints, and a folder for each job."""

    def __init__(self, folder: Path, faults: Sequence[Fault], ranks: int) -> None:
        self.folder = folder
        self.ranks = ranks
        self.save = folder / "ckpt"
        self.faults = list(faults)
        self.last_step = max(fault.step or 0 for fault in faults) + 3
        self.incidents: list[Incident] = []
        self.seconds = 0.0
        self._state = folder / "state.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._read()

    def _read(self) -> None:
        if not self._state.exists():
            return
        state = json.loads(self._state.read_text())
        if state["faults"] != [str(fault) for fault in self.faults]:
            raise JobError(f"{self.folder} is of other settings: remove it, or take another seed")
        self.incidents = [
            Incident(**{**one, "problems": tuple(one["problems"])}) for one in state["incidents"]
        ]
        self.seconds = state["seconds"]

    def keep(self, incident: Incident | None, seconds: float) -> None:
        """Write down what is known now."""
        if incident is not None:
            self.incidents.append(incident)
        self.seconds += seconds
        state = {
            "faults": [str(fault) for fault in self.faults],
            "incidents": [asdict(one) for one in self.incidents],
            "seconds": self.seconds,
        }
        scratch = self._state.with_suffix(".new")
        scratch.write_text(json.dumps(state, indent=1))
        scratch.replace(self._state)

    @property
    def jobs(self) -> list[Path]:
        return sorted(self.folder.glob("job-*"), key=lambda path: int(path.name[4:]))

    def remaining(self) -> list[tuple[int, Fault]]:
        """The faults that are still to come, with their numbers."""
        done = {incident.number for incident in self.incidents}
        reached = tracked_step(self.save) or 0
        return [
            (number, fault)
            for number, fault in enumerate(self.faults)
            if number not in done and (fault.step or 0) >= reached + 2
        ]


class Watcher:
    """Follows one job and looks into the save folder after each of its incidents."""

    def __init__(self, campaign: Campaign, job: Job, planned: Sequence[tuple[int, Fault]]) -> None:
        self._campaign = campaign
        self._job = job
        self._planned = planned
        self._seen = 0
        self._kept = time.monotonic()
        self._moved = time.monotonic()
        self._size = 0

    def tick(self) -> None:
        size = sum(path.stat().st_size for path in self._job.folder.glob("records/*.jsonl"))
        if size != self._size:
            self._size = size
            self._moved = time.monotonic()
        incidents = self._job.incidents() if self._grown() else []
        for report in incidents[self._seen :]:
            self._seen += 1
            self._moved = now = time.monotonic()
            # The generation that an incident ends is the one of its number, and so is its fault.
            known = min(self._seen, len(self._planned)) - 1
            number, fault = self._planned[known]
            incident = judge(self._job, report, number, fault, self._campaign.save, known)
            self._campaign.keep(incident, now - self._kept)
            self._kept = now
            state = "; ".join(incident.problems) or f"step {incident.saved} saved"
            print(
                f"{len(self._campaign.incidents)}/{len(self._campaign.faults)} "
                f"{incident.fault}: {state}, {1000 * incident.published_s:.0f} ms",
                flush=True,
            )
            remove_old(self._campaign.save)
        if time.monotonic() - self._moved > SILENCE_S:
            raise JobError(f"no step and no incident for {SILENCE_S:g} s: see {self._job.log}")

    def _grown(self) -> bool:
        return len(list(self._job.logs.glob("incident-*.json"))) > self._seen


def remove_old(save: Path) -> None:
    """Keep the newest checkpoints."""
    for folder in sorted(save.glob("iter_???????"))[:-KEEP]:
        shutil.rmtree(folder)


def fight(campaign: Campaign, limit: int) -> None:
    """Run jobs until no fault is left; `limit` starts of a job in a row without an incident are too many."""
    barren = 0
    while planned := campaign.remaining():
        if barren == limit:
            print(f"{limit} starts without an incident: giving up", flush=True)
            return
        before = len(campaign.incidents)
        job = new_job(campaign, planned)
        try:
            with job:
                code = job.wait(3600.0 * 24, Watcher(campaign, job, planned).tick)
            print(f"ttprun ended with exit code {code}: {job.log}", flush=True)
        except JobError as error:
            print(error, flush=True)
        barren = barren + 1 if len(campaign.incidents) == before else 0


def new_job(campaign: Campaign, planned: Sequence[tuple[int, Fault]]) -> Job:
    """The next start of ttprun, with a fault in each of its generations."""
    faults = [
        Fault(fault.rank, fault.phase, fault.kind, fault.step, restart=restart)
        for restart, (_, fault) in enumerate(planned)
    ]
    return Job(
        campaign.folder / f"job-{len(campaign.jobs)}",
        adaptor=True,
        train_iters=campaign.last_step,
        ranks=campaign.ranks,
        save_interval=SAVE_INTERVAL,
        launcher=["--max-restarts", str(len(faults))],
        faults=faults,
        save=campaign.save,
    )


def reference(campaign: Campaign) -> Job:
    """The run of the unmodified framework over all the steps; made once."""
    job = Job(
        campaign.folder / "reference", adaptor=False, train_iters=campaign.last_step, ranks=campaign.ranks
    )
    done = job.folder / "done"
    if not done.exists():
        shutil.rmtree(job.folder, ignore_errors=True)
        print(f"reference: {campaign.last_step} steps of the unmodified framework", flush=True)
        with job:
            code = job.wait(3600.0)
        if code != 0:
            raise JobError(f"the reference ended with exit code {code}: see {job.log}")
        done.touch()
    return job


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--incidents", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20250101)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["sigkill"])
    parser.add_argument("--ranks", type=int, default=RANKS, help="data-parallel processes, an even number")
    parser.add_argument("--write", type=Path, metavar="FILE", help="also write the table as a page")
    parser.add_argument("--tries", type=int, default=3, help="starts of ttprun in a row without an incident")
    given = parser.parse_args()
    settings = {
        "seed": given.seed,
        "incidents": given.incidents,
        "kinds": " ".join(given.kinds),
        "ranks": given.ranks,
    }
    benchmark = Benchmark("campaign", settings)
    folder = OUT / f"campaign-{given.seed}-{given.incidents}-{given.ranks}"
    campaign = Campaign(folder, schedule(given.seed, given.incidents, given.kinds, given.ranks), given.ranks)
    if campaign.incidents:
        print(f"going on after {len(campaign.incidents)} incidents in {folder.relative_to(ROOT)}", flush=True)
    undisturbed = reference(campaign)
    fight(campaign, given.tries)
    jobs = [Job(path, adaptor=True, train_iters=campaign.last_step) for path in campaign.jobs]
    equal, problems = compare(undisturbed, jobs, campaign.incidents)

    same = "bit for bit those of the unmodified framework in a run without faults"
    good = [one for one in campaign.incidents if not one.problems]
    problems += [f"{one.fault}: {problem}" for one in campaign.incidents for problem in one.problems]
    minutes, each = campaign.seconds / 60, campaign.seconds / max(1, len(campaign.incidents))
    summary = [
        f"{len(good)} of {given.incidents} faults survived, the newest finished step saved each time.",
        f"{equal} records (loss, grad norm) of {campaign.last_step} steps on {given.ranks} ranks are {same}.",
        f"{minutes:.0f} minutes, {each:.1f} s per incident with its restart; starts of ttprun: {len(jobs)}.",
    ]
    summary += [f"PROBLEM: {problem}" for problem in problems]
    text = fault_table(campaign.incidents)
    succeeded = len(good) == given.incidents and not problems
    benchmark.finish(
        text + "\n\n" + "\n".join(summary),
        {
            "incidents": [asdict(one) for one in campaign.incidents],
            "problems": problems,
            "reached": succeeded,
        },
    )
    if given.write:
        words = f"--incidents {given.incidents} --seed {given.seed} --kinds {' '.join(given.kinds)}"
        words += f" --ranks {given.ranks}"
        command = f"python benchmarks/campaign.py {words} --write {given.write}"
        given.write.write_text(page(benchmark.where, command, text, summary))
    if not succeeded:
        raise JobError(f"{len(good)} of {given.incidents} survived, {len(problems)} problems")


if __name__ == "__main__":
    run(main)
