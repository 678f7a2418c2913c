"""Where a dump stands still, those who take part are asked whether they are there; pure, without a clock.

Whoever answers is at work, or waits for another, or for a disk. Whoever does not is stuck.
"""

from __future__ import annotations

from collections.abc import Iterable

# A dump moves several times a second, on a slow disk too; and the thread that answers does nothing else.
STUCK_S = 5.0


class RollCall:
    """One of an incident.

    unanswered  those who have been asked and have said nothing yet
    silent      those of them who had all the time for it, and were asked once more

    Args:
        patience_s: so long nothing has to move before anyone is asked, and so long they have for an answer.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._moved = True
        self._due_at = 0.0
        self.unanswered: set[int] = set()
        self.silent: set[int] = set()

    def moved(self) -> None:
        """Something of the dump has moved: nobody is asked for a while."""
        self._moved = True

    def answer(self, rank: int) -> None:
        self.unanswered.discard(rank)
        self.silent.discard(rank)

    def is_due(self, now: float) -> bool:
        """Whether nothing has moved since it was last asked, or due, for long enough."""
        if self._moved:
            self._moved = False
            self.unanswered, self.silent = set(), set()
            self._due_at = now + self._patience_s
        if now < self._due_at:
            return False
        self._due_at = now + self._patience_s
        return True

    def call(self, ranks: Iterable[int]) -> list[int]:
        """Ask `ranks`; returns them in order."""
        self.silent = self.unanswered
        self.unanswered = set(ranks)
        return sorted(self.unanswered)
