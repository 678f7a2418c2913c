"""The look for what a controller that is lost had saved; pure, the time comes in as an argument."""

from __future__ import annotations

from adaptor.control.freezing import Freezing
from adaptor.control.stages import Outcome
from adaptor.control.writing import Writing


class Finding:
    """Of one incident. Who publishes for the controller that is lost may not have done yet: one looks again.

    Args:
        took_over: there is a controller that is lost.
        patience_s: so long, of the time of the incident, it is looked for.

    otherwise  how the incident ends where nothing is found
    """

    def __init__(self, freezing: Freezing, writing: Writing, took_over: bool, patience_s: float) -> None:
        self._freezing = freezing
        self._writing = writing
        self._took_over = took_over
        self.patience_s = patience_s if took_over else 0.0
        self.otherwise: Outcome | None = None
        self._until = 0.0
        self._found_nothing = False

    @property
    def may_find(self) -> bool:
        """Whether a controller that is lost may have had all saved: whoever takes its place does not know.

        It may have let ranks through to a step that nobody had begun.
        """
        return self._took_over and bool(self._writing.layouts) and not self._writing.handled

    @property
    def step(self) -> int:
        """Nothing is lost with that one, or a later one."""
        return max(self._freezing.newest_told, self._writing.origin + 1)

    def found(self, step: int) -> Outcome:
        """That one is on disk: last words may be of an earlier step than the newest that was told."""
        told, begun = self._freezing.newest_told, self._freezing.newest_begun
        if told > step:
            return Outcome("saved", step, f"step {told} was not finished on every rank")
        return Outcome("saved", step, f"step {begun} may have begun" if begun > step else "")

    def found_nothing(self) -> None:
        """An agent has looked."""
        self._found_nothing = True

    def is_over(self, now: float, deadline: float) -> bool:
        """Whether it was looked for long enough; an agent that does not answer has until `deadline`."""
        self._until = self._until or now + self.patience_s
        return now >= deadline or (self._found_nothing and now >= self._until)

    def is_due(self) -> bool:
        """Whether an agent is to look again: it has, and found nothing."""
        again, self._found_nothing = self._found_nothing, False
        return again
