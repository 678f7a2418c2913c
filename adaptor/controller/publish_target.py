"""The temporary folder of an incident, and the agent that makes and publishes it; pure, without a clock."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import PurePath

from adaptor.protocol import naming
from adaptor.protocol.messages import Find, Prepare, Prepared, Publish, Published, PublishFailed

Order = Prepare | Publish | Find

# An error of one node's disk, or of its rights, is worth a try elsewhere; a third one is that of the folder.
MAX_REFUSALS = 3


class PublishTarget:
    """The temporary folder of one incident, and its publisher.

    Invariant: two agents are never at work on one folder, whether the one before is lost, cut off, stopped
    or waits for its disk. So who makes it in the place of another makes another `number`, and who publishes
    it in the place of another gives it a new number first. Answers count only from the node that was asked,
    for the step and the folder that were ordered.

    Args:
        agents: the nodes with an agent; the owner takes out what is gone.
        first: the number of the first order; those below are of incidents that were recovered online.

    Attributes:
        number: of the newest order
        is_first: whether that is the first order of the incident
        path: of the folder, once it is there, which was made by the order `written`
        blocked: nodes on which the save folder does not answer
        hung: for too long, while it was published
    """

    def __init__(self, agents: Collection[int], first: int = 0) -> None:
        self._agents = agents
        self._first = first
        self._refusals: dict[int, str] = {}
        self._asked: dict[tuple[type[Order], int], tuple[int, Order]] = {}  # by the number of the order
        self.publisher = -1
        self.number = first
        self.written = 0
        self.path = ""
        self.blocked: set[int] = set()
        self.hung = False

    @property
    def is_first(self) -> bool:
        """Return whether the folder is that of the first attempt of the job's first incident."""
        return self.number == self._first

    def choose(self, node: int) -> None:
        """The agent of `node`, unless its disk is known to fail."""
        self.publisher = min(
            {node, *self._agents},
            key=lambda node_number: (self._fails(node_number), node_number != node, node_number),
        )

    def hand_over(self, last: Collection[int] = ()) -> None:
        """Give it to another agent: the one with it is lost, has failed or hangs.

        Args:
            last: nodes whose agents get it only where there is no other.
        """
        self.number += 1
        self.publisher = min(self._agents, key=lambda node: (node in last, self._fails(node), node))

    def ask(self, order: Order, node: int) -> None:
        """Record that `order` goes to the agent of `node`: only its answer will count."""
        self._asked[type(order), order.number] = node, order

    def is_from_asked_agent(self, answer: Prepared | Published | PublishFailed) -> bool:
        """Return whether `answer` is of the node that was asked, for what was ordered."""
        match answer:
            case Prepared(reason=""):
                order = self._order(Prepare, answer)
                return order is not None and _is_ordered(answer.folder, order)
            case Prepared():
                return self._order(Prepare, answer) is not None
            case Published(step=step):
                order = self._order(Publish, answer)
                # The other side of a cut network may have saved a later one.
                return (order is not None and step >= order.step) or self._order(Find, answer) is not None
            case PublishFailed():
                return bool(self._order(Publish, answer) or self._order(Find, answer))

    def _order(self, kind: type[Order], answer: Prepared | Published | PublishFailed) -> Order | None:
        node, order = self._asked.get((kind, answer.number), (-1, None))
        return order if node == answer.node else None

    def _fails(self, node: int) -> bool:
        return node in self.blocked or node in self._refusals

    def refuse(self, reason: str) -> bool:
        """The agent with it has failed, for this `reason`; whether another one has it now."""
        self._refusals[self.publisher] = reason
        if all(map(self._fails, self._agents)) or len(self._refusals) >= MAX_REFUSALS:
            return False
        self.hand_over()
        return True

    @property
    def remarks(self) -> list[str]:
        """Return what is to be said of a save that has been made."""
        blocked_nodes = ", ".join(str(node) for node in sorted(self.blocked))
        further_remarks = [
            f"node {node} could not make or publish its folder: {reason}"
            for node, reason in self._refusals.items()
        ]
        return [f"the save folder does not answer on node {blocked_nodes}"] * bool(
            blocked_nodes
        ) + further_remarks


def _is_ordered(folder: str, order: Order) -> bool:
    """Return whether `folder` is one that the agent of any generation would make for `order`."""
    path, save = PurePath(folder), PurePath(order.save)
    return path.parent == save and naming.is_temporary_of(path.name, order.step, order.term, order.number)  # type: ignore[union-attr]
