"""Notes what the workers of a node tell their agent, as far as the agent itself needs it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from adaptor.protocol.messages import Died, Dying, FromAgent, Layout, Raised, TerminationRequested


class WorkerNews:
    """The news of one generation of the workers of a node.

    Args:
        ranks: of this node.

    Attributes:
        noticed: when the first fault was noticed, in Unix seconds; 0: none is known.
        training_began: the step, and when, on the monotonic clock; None: some rank does not train yet.
        first_raised: the rank that has raised first; -1: none.
    """

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self.noticed = 0.0
        self.training_began: tuple[int, float] | None = None
        self.first_raised = -1
        self._unbegun = set(ranks)  # on which training has not begun

    def note(self, message: FromAgent) -> None:
        """Note a message of a worker, or the report of its death."""
        match message:
            case Layout(rank=rank, origin=origin):
                self._unbegun.discard(rank)
                if not self._unbegun and self.training_began is None:
                    self.training_began = origin, time.monotonic()
            case Dying(at=at) | Died(at=at) if not isinstance(message, Died) or message.status:
                self.noticed = self.noticed or at
            case Raised(rank=rank):
                self.note_incident()
                if self.first_raised < 0:
                    self.first_raised = rank
            case TerminationRequested():
                self.note_incident()

    def note_incident(self) -> None:
        """Note that there is an incident, of which nothing was known here until now."""
        self.noticed = self.noticed or time.time()

    def end_incident(self) -> None:
        """Note that all ranks go on after an incident."""
        self.noticed = 0.0
        self.first_raised = -1
