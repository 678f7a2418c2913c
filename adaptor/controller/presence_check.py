"""Asks the ranks of an online recovery again and again if they are there; pure, the time is an argument.

A process that is stopped, or holds the interpreter lock, would else be noticed only when the time of the
recovery is over. What counts is how often a rank was asked in vain, so a controller that was put off itself
finds nobody missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import ceil

# The thread that answers does nothing else; a machine with more work than cores lets it wait for a second.
ROUND_S = 5.0
LEAST_S = 1.0
# So often a survivor is asked in vain before it is taken for stopped.
ROUNDS = 2


class PresenceCheck:
    """The rounds of one attempt.

    Args:
        time_now: monotonic seconds.
        timeout_s: seconds that the recovery may take. A new process imports and builds, which may hold up its
            answer: it gets half of them.
    """

    def __init__(self, time_now: float, timeout_s: float) -> None:
        self._round_s = min(ROUND_S, max(LEAST_S, timeout_s / 8))
        self._of_newcomers = max(ROUNDS, ceil(timeout_s / 2 / self._round_s))
        self._due_at = time_now + self._round_s
        self._in_vain: Counter[int] = Counter()

    def is_due(self, time_now: float) -> bool:
        """Return whether it is time for a round."""
        return time_now >= self._due_at

    def answer(self, rank: int) -> None:
        """Note that `rank` has said something."""
        del self._in_vain[rank]

    def missing(self, survivors: Iterable[int], newcomers: Iterable[int]) -> list[int]:
        """Return the ranks that were asked too often in vain, new processes behind the others."""
        return [
            *(rank for rank in sorted(survivors) if self._in_vain[rank] >= ROUNDS),
            *(rank for rank in sorted(newcomers) if self._in_vain[rank] >= self._of_newcomers),
        ]

    def begin_round(self, ranks: Iterable[int], time_now: float) -> None:
        """Note that these are asked, or could not be, because they have not said anything yet."""
        self._due_at = time_now + self._round_s
        self._in_vain.update(ranks)
