"""Measures how long steps take, from readings of the boards, for the status of a job."""

from __future__ import annotations

from bisect import bisect_left

from adaptor.operations.records import StepTimes

# From small models to steps with a save in them.
LIMITS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class StepTimer:
    """The timer of the steps of a job.

    Two readings are apart by more than a short step takes: the steps between them are taken to have lasted
    equally long.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # a step, and when it was first seen
        self._is_exact = False  # that time is when it ended, as far as readings tell
        self._counts = [0] * (len(LIMITS_S) + 1)
        self._sum = 0.0

    def look(self, step: int, time_now: float, *, counts: bool) -> None:
        """Take a reading.

        Args:
            step: the newest finished one; -1: none.
            time_now: on the monotonic clock.
            counts: whether the job trains; what lies across a time in which it does not is no step's.
        """
        if not counts or step < 0:
            self._last = None
        elif self._last is None or step < self._last[0]:
            # The step may have ended long ago: the time of the next one is not known.
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
        """Return the durations so far; None where there are none."""
        if not any(self._counts):
            return None
        return StepTimes(limits=list(LIMITS_S), counts=list(self._counts), sum=self._sum)
