"""Adds up the uses of time of a job, and measures the durations of steps, from readings of the boards.

The first worker of the controller's node reports its uses of time.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from adaptor.protocol.board import USES
from adaptor.protocol.records import STATUS_FILE, Status, StepTimes

# The event `training` reports a load, because it distinguishes starts from recoveries.
_LOAD = USES.index("load")
_STEPS = "steps"


class TimeUses:
    """The seconds of the successive processes of a rank, in the order of `USES`."""

    def __init__(self) -> None:
        self._before = [0.0] * len(USES)  # of ended processes
        self._last = [0.0] * len(USES)  # of the current process

    def look(self, reading: Sequence[float]) -> None:
        """Take a reading of the board; a smaller reading than before belongs to a new process."""
        if any(seconds_now < last for seconds_now, last in zip(reading, self._last, strict=True)):
            self.begin()
        self._last = list(reading)

    def begin(self) -> None:
        """Expect the next reading from a new process."""
        self._before = [sum(seconds_pair) for seconds_pair in zip(self._before, self._last, strict=True)]
        self._last = [0.0] * len(USES)

    @property
    def load(self) -> float:
        """Return the seconds for which the current process has loaded a checkpoint."""
        return self._last[_LOAD]

    def totals(self) -> dict[str, float]:
        """Return the seconds of all processes by their use, without loads."""
        sums = zip(USES, self._before, self._last, strict=True)
        return {use: seconds_before + last for use, seconds_before, last in sums if use != USES[_LOAD]}


class JobUses:
    """The sum over a whole job, including the sum in status.json before this ttprun had the controller.

    Steps made for the first time are `productive`, repeated steps are `wasted`. So no sum ever decreases.
    Used in the writer's thread.
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
            step: the newest finished step; None: unknown.
            generation: of workers; in each the controller may have come from another node.
        """
        if generation != self._generation:
            self._generation = generation
            uses_before: Mapping[str, float] = {}
            # The first status of a job, or the status of another version.
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                status = msgspec.json.decode((job / STATUS_FILE).read_bytes(), type=Status)
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
    """Divides the seconds of steps into first-time steps and repeated steps.

    Attributes:
        first, again: the seconds of each
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.again = 0.0
        self._seconds = 0.0
        self._step = -1
        self._highest = -1  # the newest step finished before the job went back

    def look(self, seconds: float | None, step: int | None) -> None:
        """Take a reading; steps that end between two readings count as equally long.

        Args:
            seconds: of all steps of this ttprun; None: the step belongs to another ttprun.
            step: the newest finished step; None: unknown.
        """
        if step is None:
            return
        step_before, self._step = self._step, step
        if step < step_before:  # the job has gone back and repeated the steps up to `step`
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


# From small models to steps with a save in them.
LIMITS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class StepTimer:
    """The timer of the steps of a job.

    Two readings are further apart than a short step: the steps between two readings count as equally long.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # a step, and the time of its first sight
        self._is_exact = False  # whether the time is the end of the step, as far as readings tell
        self._counts = [0] * (len(LIMITS_S) + 1)
        self._sum = 0.0

    def look(self, step: int, time_now: float, *, counts: bool) -> None:
        """Take a reading.

        Args:
            step: the newest finished step; -1: none.
            time_now: on the monotonic clock.
            counts: whether the job trains; time without training belongs to no step.
        """
        if not counts or step < 0:
            self._last = None
        elif self._last is None or step < self._last[0]:
            # The step may have ended long ago: the duration of the next step is unknown.
            self._last = step, time_now
            self._is_exact = False
        elif step > self._last[0]:
            step_before, at = self._last
            if self._is_exact:
                step_s = (time_now - at) / (step - step_before)
                self._counts[bisect_left(LIMITS_S, step_s)] += step - step_before
                self._sum += time_now - at
            self._last, self._is_exact = (step, time_now), True

    def times(self) -> StepTimes | None:
        """Return the durations so far; None without steps."""
        if not any(self._counts):
            return None
        return StepTimes(limits=list(LIMITS_S), counts=list(self._counts), sum=self._sum)
