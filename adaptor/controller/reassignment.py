"""Reassigns the work of a save from ranks and nodes that make no progress; pure, the time is an argument.

`IoStallDetector` names the nodes whose work on the save folder stands still: a disk may hang on one node
alone while all processes of the node answer. `LivenessProbe` asks the ranks of a dump that stands still for
an answer: a rank that answers is at work, or waits for another rank or for a disk; a silent rank is stuck.
`Reassignment` decides which ranks and nodes are given up, and how the save goes on without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from adaptor.controller.incident_state import IncidentState, unresponsive_words
from adaptor.controller.plan import NoPlan, Plan
from adaptor.protocol.messages import BoardRecord


class IoStallDetector:
    """The progress of each node's work on the save folder, in one incident.

    Args:
        patience_s: seconds for which the work of a node may stand still.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float | None] = {}  # None: moved since the last look

    def expect(self, nodes: Iterable[int]) -> None:
        """Expect progress of `nodes` only, which have just been given work."""
        self._since = dict.fromkeys(nodes)

    def moved(self, node: int) -> None:
        """Note that `node` makes progress."""
        if node in self._since:
            self._since[node] = None

    def overdue(self, time_now: float) -> set[int]:
        """Return the nodes whose work has stood still for too long."""
        self._since = {node: time_now if since is None else since for node, since in self._since.items()}
        latest = time_now - self._patience_s
        return {node for node, since in self._since.items() if since is not None and since <= latest}


# A dump moves several times a second, on a slow disk too; and the thread that answers does nothing else.
STUCK_S = 5.0


class LivenessProbe:
    """Asks the ranks of a dump that stands still for an answer.

    Args:
        patience_s: seconds without progress before ranks are asked, and seconds for their answers.

    Attributes:
        unanswered: the ranks that were asked and have not answered yet
        silent: the ranks whose time for an answer is over, and that were asked once more
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._moved = True
        self._due_at = 0.0
        self.unanswered: set[int] = set()
        self.silent: set[int] = set()

    def moved(self) -> None:
        """Note progress of the dump: no rank is asked for a while."""
        self._moved = True

    def answer(self, rank: int) -> None:
        """Note an answer of `rank`, so that the rank is asked for its shards again."""
        self.unanswered.discard(rank)
        self.silent.discard(rank)

    def is_due(self, time_now: float) -> bool:
        """Return True if nothing has moved for `patience_s` since ranks were last asked."""
        if self._moved:
            self._moved = False
            self.unanswered, self.silent = set(), set()
            self._due_at = time_now + self._patience_s
        if time_now < self._due_at:
            return False
        self._due_at = time_now + self._patience_s
        return True

    def call(self, ranks: Iterable[int]) -> list[int]:
        """Note that `ranks` are asked; return them in order."""
        self.silent = self.unanswered
        self.unanswered = set(ranks)
        return sorted(self.unanswered)


class Reassignment:
    """Decides which ranks and nodes are given up, and how the save goes on without them.

    Invariant: a step that all ranks have finished is never given up.
    """

    def __init__(self, state: IncidentState) -> None:
        self._state = state
        self._agents = state.membership.agents
        self._writing = state.writing
        self._target = state.target
        # Several stuck ranks, one after the other, still leave time for the dump.
        self.liveness = LivenessProbe(min(STUCK_S, state.timeout_s / 8))
        # Longer than the patience with stuck ranks; time is left for another node's disk.
        self.io_stalls = IoStallDetector(state.timeout_s / 3)

    def moved(self, node: int) -> None:
        """Note progress of the save on `node`."""
        self.liveness.moved()
        self.io_stalls.moved(node)

    # ranks

    def leave_the_stuck(self) -> bool:
        """Give up the ranks without an answer if other ranks can give their shards; return True if given
        up.
        """
        stuck = self.liveness.unanswered
        other_ranks = self._others(stuck)
        if not stuck or (
            isinstance(self._writing.rest(other_ranks), NoPlan) and self._older(other_ranks) is None
        ):
            return False
        self._state.stuck += sorted(stuck)
        for rank in stuck:
            self._state.leave(rank)
        return True

    @property
    def only_the_stuck(self) -> str:
        """Return why the state is lost if only silent ranks hold a part, else ""."""
        stuck = self.liveness.silent
        if not stuck:
            return ""
        decision = self._writing.decide(self._others(stuck))
        return decision.reason + unresponsive_words(stuck) if isinstance(decision, NoPlan) else ""

    # nodes

    def overdue(self, time_now: float, *, dumping: bool) -> set[int]:
        """Return the nodes whose work with the save folder stands still."""
        overdue = self.io_stalls.overdue(time_now)
        if dumping:  # some nodes may have written their whole part
            overdue &= {self._state.nodes.get(order.writer, -1) for order in self._writing.pending.values()}
        for node in overdue:  # whatever follows, the node is not reported again at once
            self.io_stalls.moved(node)
        return overdue

    def may_be_held_up(self, overdue: set[int]) -> bool:
        """Return True if a writer on an `overdue` node may wait for a holder on another node, whose disk
        hangs.
        """
        nodes = self._state.nodes
        return self._writing.is_in_place and any(
            nodes.get(order.writer, -1) in overdue and len({nodes.get(rank, -1) for rank in order.ranks}) > 1
            for order in self._writing.pending.values()
        )

    def prepare(self, overdue: set[int]) -> bool:
        """Hand the folder over to another node if possible; return True if so."""
        blocked = self._target.blocked | overdue
        if blocked.issuperset(self._agents):
            return False
        self._writing.avoid |= self._there(overdue)
        self._target.blocked |= overdue
        if self._target.publisher in blocked:
            self._target.hand_over()
        return True

    def dump(self, overdue: set[int]) -> Plan | None:
        """Return a plan that writes on other nodes, or an older step; None if neither is possible."""
        excluded_ranks = self._there(overdue)
        boards = self._state.boards
        new_plan = self._writing.elsewhere(excluded_ranks, boards) or self._older(boards, excluded_ranks)
        return new_plan if new_plan is not None and self.prepare(overdue) else None

    def publish(self, overdue: set[int]) -> bool:
        """Hand the publication over, once: if the next node takes as long, the folder hangs, and each would
        begin anew.

        A node that has answered in this incident is preferred: a spare node that has come meanwhile has shown
        nothing yet.
        """
        if self._target.hung or overdue.issuperset(self._agents):
            return False
        self._target.hung = True
        self._target.blocked |= overdue
        self._target.hand_over(overdue | set(self._agents).difference(self._state.nodes.values()))
        return True

    def _there(self, overdue: set[int]) -> set[int]:
        blocked = self._target.blocked | overdue
        return {rank for rank, node in self._state.nodes.items() if node in blocked}

    def _others(self, ranks: Collection[int]) -> dict[int, BoardRecord]:
        return {rank: board for rank, board in self._state.boards.items() if rank not in ranks}

    def _older(self, boards: Mapping[int, BoardRecord], excluded_ranks: Collection[int] = ()) -> Plan | None:
        """Return a plan for an older step that `boards` can save alone, or None.

        Ranks in `excluded_ranks`, whose disk hangs, give only shards that no other rank has, and write
        nothing. No step that all ranks have finished is given up: a rank that has finished a step can give
        the step.
        """
        decision = self._writing.decide(boards, excluded_ranks)
        if isinstance(decision, NoPlan) or not self._writing.origin < decision.step < self._writing.step:
            return None
        return decision
