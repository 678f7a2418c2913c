"""What is known of a campaign, and who follows a job of it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _job import Job, JobError
from _layouts import CUTS
from _schedule import Planned
from _verdicts import FAILED, Incident, judge

SILENCE_S = 180.0
KEEP = 2


class EnoughError(Exception):
    """The job is not needed any longer."""


class Campaign:
    """The folder of one seed and its settings: `state.json`, and for each layout the checkpoints and a
    folder for each job."""

    def __init__(self, folder: Path, planned: Sequence[Planned]) -> None:
        self.folder = folder
        self.planned = list(planned)
        self.incidents: list[Incident] = []
        self.seconds = 0.0
        self._state = folder / "state.json"
        folder.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            state = json.loads(self._state.read_text())
            self.incidents = [_incident(one) for one in state["incidents"]]
            self.seconds = state["seconds"]

    def keep(self, incident: Incident, seconds: float) -> None:
        """Write down what is known now."""
        self.incidents.append(incident)
        self.seconds += seconds
        state = {"incidents": [asdict(one) for one in self.incidents], "seconds": self.seconds}
        scratch = self._state.with_suffix(".new")
        scratch.write_text(json.dumps(state, indent=1))
        scratch.replace(self._state)

    def save(self, cut: str) -> Path:
        """The checkpoints of a layout."""
        return self.folder / cut / "ckpt"

    def jobs(self, cut: str) -> list[Path]:
        """The folders of its jobs, in order."""
        return sorted((self.folder / cut).glob("job-*"), key=lambda path: int(path.name[4:]))

    def rounds(self) -> Iterator[str]:
        """The layout whose turn it is, that with the fewest incidents, as long as anything is left to do."""
        while left := [cut for cut in CUTS if self.remaining(cut)]:
            yield min(left, key=lambda cut: sum(one.cut == cut for one in self.incidents))

    def remaining(self, cut: str) -> list[Planned]:
        done = {incident.number for incident in self.incidents}
        return [one for one in self.planned if one.cut == cut and one.number not in done]

    def train_iters(self, cut: str) -> int:
        """More than its jobs will ever make: the schedule of the learning rate must stay the same."""
        count = sum(one.cut == cut for one in self.planned)
        return 20 * count + 50


def _incident(told: dict[str, Any]) -> Incident:
    second = told["second"] and tuple(told["second"])
    return Incident(**{**told, "second": second, "problems": tuple(told["problems"])})


class Watcher:
    """Follows one job and looks into the save folder after each of its incidents."""

    def __init__(self, campaign: Campaign, job: Job, planned: Sequence[Planned], until: float) -> None:
        self._campaign = campaign
        self._job = job
        self._planned = list(planned)
        self._until = until
        self._seen = 0
        self._kept = self._moved = time.monotonic()
        self._size = 0

    def tick(self) -> None:
        now = time.monotonic()
        size = sum(path.stat().st_size for path in self._job.folder.glob("records/*.jsonl"))
        if size != self._size:
            self._size, self._moved = size, now
        incidents = self._job.incidents() if self._grown() else []
        for report in incidents[self._seen :]:
            # The generation that an incident ends is the one of its number, and so is its fault.
            planned = self._planned[self._seen]
            self._seen += 1
            self._moved = now
            incident = judge(self._job, report, planned)
            self._campaign.keep(incident, now - self._kept)
            self._kept = now
            state = "; ".join(incident.problems) or f"step {incident.saved} saved"
            if incident.outcome != FAILED and incident.saved < 0:
                state = report["reason"]
            print(
                f"{len(self._campaign.incidents)}/{len(self._campaign.planned)} {incident.fault}: "
                f"{incident.outcome}, {state}, {1000 * incident.published_s:.0f} ms",
                flush=True,
            )
            remove_old(self._job.save)
            # Where a node is gone, the others would wait for it.
            if self._seen == len(self._planned) or planned.fault.kind == "agent-sigkill":
                raise EnoughError
        if now > self._until:
            raise EnoughError
        if now - self._moved > SILENCE_S:
            raise JobError(f"no step and no incident for {SILENCE_S:g} s: see {self._job.log}")

    def _grown(self) -> bool:
        return len(list(self._job.logs.glob("incident-*.json"))) > self._seen


def remove_old(save: Path) -> None:
    """Keep the newest checkpoints."""
    for folder in sorted(save.glob("iter_???????"))[:-KEEP]:
        shutil.rmtree(folder)
