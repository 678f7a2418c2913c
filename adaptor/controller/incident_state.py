"""The stages of an incident, which follows which, and what changes on the way; pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from adaptor.controller.outcome import IncidentOutcome
from adaptor.protocol.messages import BoardRecord


class Stage(Enum):
    """The stages of an incident, in their order; see `Incident`."""

    FREEZING = auto()
    PREPARING = auto()
    DUMPING = auto()
    PUBLISHING = auto()
    REGROUPING = auto()
    FINDING = auto()
    ENDING_SCRIPTS = auto()
    RECOVERED = auto()
    ENDED = auto()


# Handlers of the script save without a folder that is prepared. A dump that finds no holder any more begins
# anew, with another step. An online recovery goes on whether the save has ended well or not.
TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.FREEZING: frozenset(
        {Stage.PREPARING, Stage.DUMPING, Stage.FINDING, Stage.ENDING_SCRIPTS, Stage.ENDED}
    ),
    Stage.PREPARING: frozenset({Stage.DUMPING, Stage.REGROUPING, Stage.FINDING, Stage.ENDED}),
    Stage.DUMPING: frozenset(
        {Stage.PREPARING, Stage.DUMPING, Stage.PUBLISHING, Stage.REGROUPING, Stage.FINDING, Stage.ENDED}
    ),
    Stage.PUBLISHING: frozenset({Stage.REGROUPING, Stage.FINDING, Stage.ENDED}),
    Stage.REGROUPING: frozenset({Stage.RECOVERED, Stage.ENDED}),
    Stage.FINDING: frozenset({Stage.ENDED}),
    Stage.ENDING_SCRIPTS: frozenset({Stage.ENDED}),
    Stage.RECOVERED: frozenset(),
    Stage.ENDED: frozenset(),
}


@dataclass
class IncidentState:
    """The mutable state of an incident, which its parts share; nothing of it is kept elsewhere.

    Kept apart from it: the files on disk (`Writing`), the agent that publishes them (`PublishTarget`), the
    ranks that have joined an online recovery (`Regrouping`), and the members of the job (`Membership`).

    Attributes:
        opened_at: monotonic seconds
        timeout_s: how long it may last without progress (TTP_OT)
        deadline: it has failed then
        now: the time at which something was heard last
        nodes: of the ranks that are alive and were not given up
        boards: of those of them that have answered
        silent: ranks that were given up because they did not close their doors in time
        stuck: ranks that were given up in the dump
        outcome: set with the last stage
    """

    opened_at: float
    timeout_s: float
    nodes: dict[int, int]
    deadline: float = 0.0
    now: float = 0.0
    stage: Stage = Stage.FREEZING
    outcome: IncidentOutcome | None = None
    boards: dict[int, BoardRecord] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.deadline = self.opened_at + self.timeout_s
        self.now = self.opened_at

    def move(self, stage: Stage) -> None:
        """Go to `stage`, which must be one that may follow."""
        assert stage in TRANSITIONS[self.stage], f"{self.stage.name} is not followed by {stage.name}"
        self.stage = stage

    def end(self, outcome: IncidentOutcome) -> None:
        """The last stage."""
        self.move(Stage.RECOVERED if outcome.kind == "recovered" else Stage.ENDED)
        self.outcome = outcome

    def prolong(self) -> None:
        """Start the time limit anew: the save has made progress, which does not count against it."""
        self.deadline = max(self.deadline, self.now + self.timeout_s)

    def leave(self, rank: int) -> None:
        """Take `rank` out: it has died, or is given up."""
        self.nodes.pop(rank, None)
        self.boards.pop(rank, None)
