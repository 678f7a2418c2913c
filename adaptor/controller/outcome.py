"""The ways in which an incident can end, and the shape of the controller's orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptor.protocol.messages import BoardRecord, ControllerToAgent, Phase

# The node, and what its agent is told; an order to a rank is `Addressed`. So it goes into the connection.
Order = tuple[int, ControllerToAgent]
Orders = list[Order]


@dataclass(frozen=True)
class IncidentOutcome:
    """The end of an incident: `kind` is recovered, saved, nothing or lost; `reason` is a text for the user.

    `unheld`: it is lost because a shard has no live holder, not because a save failed.
    """

    kind: str
    step: int
    reason: str
    unheld: bool = False


def do_not_answer(ranks: Iterable[int]) -> str:
    """Return the words about `ranks` that live and do not answer, for a verdict."""
    return "".join(f"; rank {rank} is alive, but does not answer" for rank in sorted(ranks))


def cannot_be_read(boards: Mapping[int, BoardRecord]) -> str:
    """Return the words about ranks whose devices cannot be read, for a verdict."""
    return "".join(
        f"; rank {rank} is alive, but its device cannot be read: {board.error}"
        for rank, board in boards.items()
        if board.phase == Phase.UNREADABLE
    )
