"""The look for what a controller that is lost had saved; pure, the time comes in as an argument."""

from __future__ import annotations

from adaptor.control.stages import Outcome


class Finding:
    """Of one incident. Who publishes for the controller that is lost may not have done yet: one looks again.

    Args:
        patience_s: so long, of the time of the incident, it is looked for.

    otherwise  how the incident ends where nothing is found
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.otherwise: Outcome | None = None
        self._until = 0.0
        self._found_nothing = False

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
