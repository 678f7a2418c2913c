"""Faults that come again and again without progress, so that another start would only meet them again; pure.

Every agent keeps the verdicts of its job, and hands what it has kept to the controller that lives with it.
The verdict says that the job is not started again, so all agents decide alike.
"""

from __future__ import annotations

import msgspec

from adaptor.protocol.messages import Verdict

# A lasting exception (`messages.Origin`) ends the job when it comes so many times, and no start has trained.
_MOST_BEFORE_TRAINING = 2
# Of a job that makes no progress. sysexits.h ends at 78, and signals begin at 128.
EXIT_NO_PROGRESS = 79


class Recurrence:
    """The faults of one job, from start to start.

    Args:
        limit: so many times the same fault may come at the same step without a newer checkpoint
            (TTP_NO_PROGRESS); 0: as often as there are restarts.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        self._last: tuple[str, int] | None = None  # the fault and the step at which it came
        self._count = 0
        self._has_trained = False  # in any start
        self._reached = 0  # the newest step saved in this series of faults; a verdict without a save keeps it

    def note(self, verdict: Verdict) -> None:
        """Count a verdict that has been given."""
        self._count = self._times(verdict)
        self._reached = max(verdict.step, self._reached if self._count > 1 else 0)
        self._last = _position(verdict)
        self._has_trained = self._has_trained or max(self._last[1], verdict.newest) >= 0

    def judge(self, verdict: Verdict) -> Verdict:
        """Return the verdict that is about to be given, with the reason why the job ends if it does."""
        times, limit = self._times(verdict), self._limit
        if not limit or verdict.stop:
            return verdict
        if verdict.fault.lasting and not self._has_trained:
            if verdict.fault.on_all_ranks and self._last is None:
                stop = f"every rank has raised {verdict.fault.key} {verdict.fault.when}"
                return msgspec.structs.replace(verdict, stop=stop)
            limit = min(limit, _MOST_BEFORE_TRAINING)
        if times < limit:
            return verdict
        often = "came once" if times == 1 else f"came {times} times"
        parts_of_line = [verdict.fault.key, often, verdict.fault.when, "without a newer checkpoint"]
        stop = f"{' '.join(filter(None, parts_of_line))} (TTP_NO_PROGRESS)"
        return msgspec.structs.replace(verdict, stop=stop, exit_code=EXIT_NO_PROGRESS)

    def _times(self, verdict: Verdict) -> int:
        if not verdict.fault.key:
            return 0
        is_repeated = _position(verdict) == self._last and verdict.step <= self._reached
        return self._count + 1 if is_repeated else 1


def _position(verdict: Verdict) -> tuple[str, int]:
    """Return what failed, and the step it had come to; the job's, where no rank is known to have failed."""
    finished = verdict.fault.finished
    return verdict.fault.key, verdict.newest if finished is None else finished
