"""Adds up what a job uses time for, as the first worker of the controller's node tells it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from adaptor.operations import job_folder
from adaptor.operations.job_folder import JobFolderError
from adaptor.protocol.board import USES

# A load is told with the event `training`, by which it is known whether it was in a start or a recovery.
_LOAD = USES.index("load")
_STEPS = "steps"


class TimeUses:
    """The seconds of the processes that this place has had one after the other, in the order of `USES`."""

    def __init__(self) -> None:
        self._before = [0.0] * len(USES)  # of processes that are gone
        self._last = [0.0] * len(USES)  # of the present one

    def look(self, reading: Sequence[float]) -> None:
        """Take a reading of the board; one that is less than the last one is that of a new process."""
        if any(seconds_now < last for seconds_now, last in zip(reading, self._last, strict=True)):
            self.begin()
        self._last = list(reading)

    def begin(self) -> None:
        """The next reading is that of a new process."""
        self._before = [sum(seconds_pair) for seconds_pair in zip(self._before, self._last, strict=True)]
        self._last = [0.0] * len(USES)

    @property
    def load(self) -> float:
        """Return the seconds in which the present process has loaded a checkpoint."""
        return self._last[_LOAD]

    def totals(self) -> dict[str, float]:
        """Return the seconds of all processes by their use, without loads."""
        sums = zip(USES, self._before, self._last, strict=True)
        return {use: seconds_before + last for use, seconds_before, last in sums if use != USES[_LOAD]}


class JobUses:
    """The sum over a whole job: what was used before this ttprun had the controller is in status.json.

    Steps that are made for the first time are `productive`, those that are made again `wasted`. So no sum is
    ever less than before. In the writer's thread.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._before: Mapping[str, float] = {}
        self._written: Mapping[str, float] = {}
        self._divided = StepsMadeAgain()

    def total(
        self, own_uses: Mapping[str, float], step: int | None, generation: int, job: Path
    ) -> dict[str, float]:
        """Return the seconds of the whole job.

        Args:
            own_uses: of this ttprun.
            step: the newest that is finished; None: none is known.
            generation: of workers; in each the controller may have come from another node.
            job: the folder of the job.
        """
        if generation != self._generation:
            self._generation = generation
            uses_before: Mapping[str, float] = {}
            with contextlib.suppress(JobFolderError):  # the first status of a job
                status = job_folder.status(job)
                uses_before = status.spent
                self._divided.look(None, status.step)
            self._before = {
                use: max(0.0, uses_before[use] - self._written.get(use, 0.0)) for use in uses_before
            }
        self._divided.look(own_uses.get(_STEPS, 0.0), step)
        uses = {use: seconds for use, seconds in own_uses.items() if use != _STEPS}
        self._written = {"productive": self._divided.first, "wasted": self._divided.again, **uses}
        return {use: self._before.get(use, 0.0) + seconds for use, seconds in self._written.items()}


class StepsMadeAgain:
    """Divides the seconds of steps into those that were made for the first time and those made again.

    Attributes:
        first, again: the seconds of each
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.again = 0.0
        self._seconds = 0.0
        self._step = -1
        self._highest = -1  # the newest step that was ever finished before the job went back

    def look(self, seconds: float | None, step: int | None) -> None:
        """Take a reading; several steps that end between two are taken to be equally long.

        Args:
            seconds: of all steps of this ttprun; None: the step is that of another one.
            step: the newest that is finished; None: none is known.
        """
        if step is None:
            return
        step_before, self._step = self._step, step
        if step < step_before:  # it has gone back, and made the steps up to this one again
            self._highest = max(self._highest, step_before)
            share = 1.0
        elif step == step_before:
            share = float(step <= self._highest)
        else:
            share = max(0, min(step, self._highest) - step_before) / (step - step_before)
        if seconds is not None:
            further_s = max(0.0, seconds - self._seconds)
            self._seconds = seconds
            self.again += further_s * share
            self.first += further_s * (1.0 - share)
