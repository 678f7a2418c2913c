"""The look for what a controller that is lost had saved; pure, the time comes in as an argument."""

from __future__ import annotations

from adaptor.controller.freeze import FreezeState
from adaptor.controller.outcome import IncidentOutcome
from adaptor.controller.save_attempts import Writing


class PriorCheckpointSearch:
    """The search of one incident. Another agent may still publish for the lost controller: one looks again.

    Args:
        took_over: there is a controller that is lost.
        patience_s: so long, of the time of the incident, it is looked for.

    Attributes:
        otherwise: how the incident ends where nothing is found
    """

    def __init__(
        self, freeze_state: FreezeState, writing: Writing, took_over: bool, patience_s: float
    ) -> None:
        self._freeze_state = freeze_state
        self._writing = writing
        self._took_over = took_over
        self.patience_s = patience_s if took_over else 0.0
        self.otherwise: IncidentOutcome | None = None
        self._until = 0.0
        self._found_nothing = False

    @property
    def may_find(self) -> bool:
        """Return True if the lost controller may have had a step saved, which its successor cannot know.

        It may have let ranks through to a step that no rank had begun.
        """
        return self._took_over and bool(self._writing.layouts) and not self._writing.uses_script_handlers

    @property
    def step(self) -> int:
        """Return the step from which on a found checkpoint loses nothing."""
        return max(self._freeze_state.newest_told, self._writing.origin + 1)

    def found(self, step: int) -> IncidentOutcome:
        """Note that `step` was found on disk; last words may be of an earlier step than the newest known."""
        newest_reported, newest_begun = self._freeze_state.newest_told, self._freeze_state.newest_begun
        if newest_reported > step:
            return IncidentOutcome("saved", step, f"step {newest_reported} was not finished on every rank")
        return IncidentOutcome(
            "saved", step, f"step {newest_begun} may have begun" if newest_begun > step else ""
        )

    def found_nothing(self) -> None:
        """An agent has looked."""
        self._found_nothing = True

    def is_over(self, time_now: float, deadline: float) -> bool:
        """Return True when the search is over; an agent that does not answer has until `deadline`."""
        self._until = self._until or time_now + self.patience_s
        return time_now >= deadline or (self._found_nothing and time_now >= self._until)

    def is_due(self) -> bool:
        """Return whether an agent is to look again: it has, and found nothing."""
        is_repeated, self._found_nothing = self._found_nothing, False
        return is_repeated
