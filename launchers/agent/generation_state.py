"""Notes for the agent about a generation: messages of the workers, and the number of starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from adaptor.protocol.messages import Died, Dying, FromAgent, Layout, Raised, TerminationRequested


class WorkerNews:
    """The news of one generation of the workers of a node.

    Attributes:
        noticed: when the first fault was noticed, in Unix seconds; 0: no fault.
        training_began: the first step and the time on the monotonic clock; None: some rank does not train
            yet.
        first_raised: the rank that raised first; -1: none.
    """

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self.noticed = 0.0
        self.training_began: tuple[int, float] | None = None
        self.first_raised = -1
        self._unbegun = set(ranks)  # ranks that do not train yet

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
        """Note an incident of which nothing was known on the node."""
        self.noticed = self.noticed or time.time()

    def end_incident(self) -> None:
        """Note that all ranks go on after an incident."""
        self.noticed = 0.0
        self.first_raised = -1


class StartCounts(NamedTuple):
    """The starts of the workers of a job so far, for nodes that join later.

    Attributes:
        restarts: the used restarts of --max-restarts
        generations: the number of starts of workers, restarts included
    """

    restarts: int = 0
    generations: int = 0


NO_STARTS = StartCounts()
