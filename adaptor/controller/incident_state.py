"""The state of an incident, shared by its parts, and the shapes of its outcome and of orders; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from adaptor.controller.membership import Membership
from adaptor.controller.save_attempts import PublishTarget, Writing
from adaptor.protocol.messages import (
    Addressed,
    BoardRecord,
    ControllerToAgent,
    Find,
    Freeze,
    Phase,
    Prepare,
    Publish,
    ToWorker,
)

# A node, and the message to its agent. An order to a rank is wrapped in `Addressed`.
Order = tuple[int, ControllerToAgent]
Orders = list[Order]


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


# PREPARING is left out where handlers of the script save. A dump that loses the last holder of a shard starts
# again with another step, or waits for ranks that were given up. An online recovery starts whether the save
# has succeeded or failed; if no step can be saved, from copies in host memory.
TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.FREEZING: frozenset(
        {
            *(Stage.FREEZING, Stage.PREPARING, Stage.DUMPING, Stage.REGROUPING),
            *(Stage.FINDING, Stage.ENDING_SCRIPTS, Stage.ENDED),
        }
    ),
    Stage.PREPARING: frozenset({Stage.DUMPING, Stage.REGROUPING, Stage.FINDING, Stage.ENDED}),
    Stage.DUMPING: frozenset(
        {
            *(Stage.FREEZING, Stage.PREPARING, Stage.DUMPING, Stage.PUBLISHING),
            *(Stage.REGROUPING, Stage.FINDING, Stage.ENDED),
        }
    ),
    Stage.PUBLISHING: frozenset({Stage.REGROUPING, Stage.FINDING, Stage.ENDED}),
    Stage.REGROUPING: frozenset({Stage.RECOVERED, Stage.FINDING, Stage.ENDED}),
    Stage.FINDING: frozenset({Stage.ENDED}),
    Stage.ENDING_SCRIPTS: frozenset({Stage.ENDED}),
    Stage.RECOVERED: frozenset(),
    Stage.ENDED: frozenset(),
}


@dataclass(frozen=True)
class IncidentOutcome:
    """The end of an incident: `kind` is recovered, saved, nothing or lost; `reason` is a text for the user.

    `unheld`: the state is lost because a shard has no live holder, not because a save failed.
    """

    kind: str
    step: int
    reason: str
    unheld: bool = False


@dataclass
class IncidentState:
    """The state of incident `number`, shared by all its parts.

    Attributes:
        term: of the controller
        home: the node of the controller
        timeout_s: the time limit without progress (TTP_OT)
        writing: the groups on disk, and the rest
        nodes: of live ranks, without given-up ranks
        boards: of the ranks with an answer
        silent: ranks that were given up because their doors were not closed in time
        stuck: ranks that were given up in the dump
    """

    number: int
    term: int
    home: int
    store: tuple[str, int, bytes]
    membership: Membership
    opened_at: float
    timeout_s: float
    writing: Writing
    target: PublishTarget
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

    @property
    def given_up(self) -> list[int]:
        """The ranks that were given up, live, and have not answered since."""
        ranks = (*self.silent, *self.stuck)
        return [rank for rank in ranks if rank not in self.nodes and self.membership.lives(rank)]

    def move(self, stage: Stage) -> None:
        """Go to `stage`, which must be a stage that may follow."""
        assert stage in TRANSITIONS[self.stage], f"{self.stage.name} is not followed by {stage.name}"
        self.stage = stage

    def end(self, outcome: IncidentOutcome) -> None:
        """Go to the last stage."""
        self.move(Stage.RECOVERED if outcome.kind == "recovered" else Stage.ENDED)
        self.outcome = outcome

    def prolong(self) -> None:
        """Start the time limit anew after progress of the save."""
        self.deadline = max(self.deadline, self.now + self.timeout_s)

    def leave(self, rank: int) -> None:
        """Take out `rank`, which has died or is given up."""
        self.nodes.pop(rank, None)
        self.boards.pop(rank, None)

    def order(self, rank: int, message: ToWorker) -> Order:
        """Return the order with `message` for `rank`."""
        return self.membership.node_of[rank], Addressed(rank, message)

    def freeze(self, ranks: Iterable[int], *, stacks: bool = False) -> Orders:
        """Return the orders to freeze `ranks`; with `stacks` each rank tells where its main thread stands."""
        return [self.order(rank, Freeze(self.number, stacks)) for rank in ranks]

    def ask(self, order: Prepare | Publish | Find, node: int) -> Order:
        """Return `order` for the agent of `node`; only the answer of this agent counts."""
        self.target.ask(order, node)
        return node, order


def unresponsive_words(ranks: Iterable[int]) -> str:
    """Return the words of a verdict about `ranks` that live and do not answer."""
    return "".join(f"; rank {rank} is alive, but does not answer" for rank in sorted(ranks))


def unreadable_words(boards: Mapping[int, BoardRecord]) -> str:
    """Return the words of a verdict about ranks whose devices cannot be read."""
    return "".join(
        f"; rank {rank} is alive, but its device cannot be read: {board.error}"
        for rank, board in boards.items()
        if board.phase == Phase.UNREADABLE
    )
