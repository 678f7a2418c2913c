"""The state of a campaign, and the watcher of one of its jobs."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _job import Job, JobError
from _layouts import CUTS
from _schedule import OF_NODES, Planned
from _verdicts import FAILED, Incident, judge

SILENCE_S = 180.0
# Seconds without the planned fault, after which the job has missed it.
MISSED_S = 300.0
# Seconds after which both sides of a cut have reported: neither waits longer than a silence and TTP_OT.
SIDES_S = 30.0
KEEP = 2


class Campaign:
    """The folder of a seed and its settings.

    It has `state.json`, and for each layout the checkpoints and a folder for each job.
    """

    def __init__(self, folder: Path, planned: Sequence[Planned]) -> None:
        self.folder = folder
        self.planned = list(planned)
        self.incidents: list[Incident] = []
        self.seconds = 0.0
        self._kept = time.monotonic()
        self._lock = threading.Lock()
        self._state = folder / "state.json"
        folder.mkdir(parents=True, exist_ok=True)
        if self._state.exists():
            state = json.loads(self._state.read_text())
            self.incidents = [_incident(incident) for incident in state["incidents"]]
            self.seconds = state["seconds"]

    def keep(self, incident: Incident) -> None:
        """Write down a new incident."""
        with self._lock:
            time_now = time.monotonic()
            self.incidents.append(incident)
            self.seconds += time_now - self._kept
            self._kept = time_now
            state = {"incidents": [asdict(incident) for incident in self.incidents], "seconds": self.seconds}
            scratch = self._state.with_suffix(".new")
            scratch.write_text(json.dumps(state, indent=1))
            scratch.replace(self._state)

    def save(self, cut: str) -> Path:
        """Return the folder of a layout's checkpoints."""
        return self.folder / cut / "ckpt"

    def jobs(self, cut: str) -> list[Path]:
        """Return the folders of a layout's jobs, in order."""
        return sorted((self.folder / cut).glob("job-*"), key=lambda path: int(path.name[4:]))

    def next_layout(self, busy: Collection[str]) -> str | None:
        """Return the next layout: that with the fewest incidents; None if all remaining layouts are busy."""
        remaining = [cut for cut in CUTS if cut not in busy and self.remaining(cut)]
        return min(
            remaining, key=lambda cut: sum(incident.cut == cut for incident in self.incidents), default=None
        )

    def remaining(self, cut: str) -> list[Planned]:
        numbers_done = {incident.number for incident in self.incidents}
        return [
            planned for planned in self.planned if planned.cut == cut and planned.number not in numbers_done
        ]

    def train_iters(self, cut: str) -> int:
        """More than its jobs will ever make: the schedule of the learning rate must stay the same."""
        count = sum(planned.cut == cut for planned in self.planned)
        return 20 * count + 50


def _incident(stored: dict[str, Any]) -> Incident:
    second = stored["second"] and tuple(stored["second"])
    return Incident(**{**stored, "second": second, "problems": tuple(stored["problems"])})


class Watcher:
    """Follows one job and looks into the save folder after each of its incidents."""

    def __init__(self, campaign: Campaign, job: Job, planned: Sequence[Planned]) -> None:
        self._campaign = campaign
        self._job = job
        self._left = list(planned)
        self._read = 0  # reports
        self._told: float | None = None  # when the first side of a cut did
        self._moved = self._judged = time.monotonic()
        self._size = 0

    def tick(self) -> bool:
        """Look; whether the job is needed any longer. Raises JobError where nothing moves."""
        time_now = time.monotonic()
        has_ended = self._job.returncode is not None
        size = sum(path.stat().st_size for path in self._job.folder.glob("records/*.jsonl"))
        if size != self._size:
            self._size, self._moved = size, time_now
        while reports := self._reports(time_now, has_ended=has_ended):
            self._moved = self._judged = time_now
            # The generation that an incident ends is the one of its number, and so is its fault.
            planned = self._left.pop(0)
            self._campaign.keep(self._tell(judge(self._job, reports, planned), reports))
            remove_old(self._job.save)
            # Where a node is gone, the others would wait for it.
            if not self._left or planned.fault.kind in OF_NODES:
                return False
        if time_now - self._moved > SILENCE_S:
            raise JobError(f"no step and no incident for {SILENCE_S:g} s: see {self._job.log}")
        if time_now - self._judged > MISSED_S:
            raise JobError(f"this has not struck: {self._left[0]}: see {self._job.log}")
        return not has_ended

    def _reports(self, time_now: float, *, has_ended: bool) -> list[dict[str, Any]]:
        """Return the reports of the next incident, or none before all have come."""
        if len(list(self._job.logs.glob("*/incidents/*.json"))) == self._read:
            return []
        reports, planned = self._job.incidents()[self._read :], self._left[0]
        struck = [(stamp["kind"], stamp["restart"]) for stamp in self._job.struck()]
        if ("cut", planned.fault.restart) not in struck:
            reports = reports[:1]
        elif len(reports) < CUTS[planned.cut].nodes:
            self._told = self._told or time_now
            if not has_ended and time_now - self._told < SIDES_S:
                return []
        self._read += len(reports)
        return reports

    def _tell(self, incident: Incident, reports: Sequence[dict[str, Any]]) -> Incident:
        state = "; ".join(incident.problems) or f"step {incident.saved} saved"
        if incident.outcome != FAILED and incident.saved < 0:
            state = reports[0]["reason"]
        print(
            f"{len(self._campaign.incidents) + 1}/{len(self._campaign.planned)} {incident.fault}: "
            f"{incident.outcome}, {state}, {1000 * incident.published_s:.0f} ms",
            flush=True,
        )
        return incident


def remove_old(save: Path) -> None:
    """Keep the newest checkpoints."""
    for folder in sorted(save.glob("iter_???????"))[:-KEEP]:
        shutil.rmtree(folder)
