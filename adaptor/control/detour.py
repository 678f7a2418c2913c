"""Who is given up because nothing of it moves, and how it goes on without; pure, the time comes in."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from adaptor.control.freezing import Freezing
from adaptor.control.messages import BoardRecord
from adaptor.control.place import Place
from adaptor.control.plan import NoPlan, Plan
from adaptor.control.roll_call import STUCK_S, RollCall
from adaptor.control.standstill import Standstill
from adaptor.control.useless import do_not_answer
from adaptor.control.writing import Writing


class Detour:
    """Of one incident. Invariant: whoever is given up, no step that all have finished is given up with it.

    Args:
        nodes: of the ranks that are alive; who is stuck is taken out here.
        agents: the nodes with an agent; the owner takes out what is gone.
        timeout_s: of the incident.

    stuck  ranks that were given up in the dump
    """

    def __init__(
        self,
        nodes: dict[int, int],
        agents: Collection[int],
        freezing: Freezing,
        writing: Writing,
        place: Place,
        timeout_s: float,
    ) -> None:
        self._nodes = nodes
        self._agents = agents
        self._freezing = freezing
        self._writing = writing
        self._place = place
        # Some that are stuck, one after the other, still leave time for the dump.
        self.roll_call = RollCall(min(STUCK_S, timeout_s / 8))
        # Longer than whoever is stuck is waited for, and time is left for another node's disk.
        self.standstill = Standstill(timeout_s / 3)
        self.stuck: list[int] = []

    def moved(self, node: int) -> None:
        """Something of the save has moved there."""
        self.roll_call.moved()
        self.standstill.moved(node)

    # ranks

    def leave_the_stuck(self) -> bool:
        """Give up those who have not answered, where others can give what they were chosen for."""
        stuck = self.roll_call.unanswered
        others = self._others(stuck)
        if not stuck or (isinstance(self._writing.rest(others), NoPlan) and self._older(others) is None):
            return False
        self.stuck += sorted(stuck)
        for rank in stuck:
            del self._nodes[rank]
            self._freezing.forget(rank)
        return True

    @property
    def only_the_stuck(self) -> str:
        """Why it is lost, where nobody else has what those who do not answer were chosen for."""
        stuck = self.roll_call.silent
        if not stuck:
            return ""
        decision = self._writing.decide(self._others(stuck))
        return decision.reason + do_not_answer(stuck) if isinstance(decision, NoPlan) else ""

    # nodes

    def overdue(self, now: float, *, dumping: bool) -> set[int]:
        """The nodes whose work with the save folder stands still."""
        overdue = self.standstill.overdue(now)
        if dumping:  # some may have written all that they were to write
            overdue &= {self._nodes.get(order.writer, -1) for order in self._writing.pending.values()}
        for node in overdue:  # whatever comes of it, it is not asked for again at once
            self.standstill.moved(node)
        return overdue

    def prepare(self, overdue: set[int]) -> bool:
        """Whether another node can make the folder; its agent has it now."""
        blocked = self._place.blocked | overdue
        if blocked.issuperset(self._agents):
            return False
        self._writing.avoid |= self._there(overdue)
        self._place.blocked |= overdue
        if self._place.publisher in blocked:
            self._place.hand_over()
        return True

    def dump(self, overdue: set[int]) -> Plan | None:
        """Write on other nodes what they can write, or an older step; None where they can do neither."""
        there = self._there(overdue)
        boards = self._freezing.boards
        again = self._writing.elsewhere(there, boards) or self._older(boards, there)
        return again if again is not None and self.prepare(overdue) else None

    def publish(self, overdue: set[int]) -> bool:
        """Once: if it takes the next one as long, it is the folder, and each would begin anew for ever."""
        if self._place.hung or overdue.issuperset(self._agents):
            return False
        self._place.hung = True
        self._place.blocked |= overdue
        self._place.hand_over(overdue)
        return True

    def _there(self, overdue: set[int]) -> set[int]:
        blocked = self._place.blocked | overdue
        return {rank for rank, node in self._nodes.items() if node in blocked}

    def _others(self, ranks: Collection[int]) -> dict[int, BoardRecord]:
        return {rank: board for rank, board in self._freezing.boards.items() if rank not in ranks}

    def _older(self, boards: Mapping[int, BoardRecord], there: Collection[int] = ()) -> Plan | None:
        """A step that these can save alone, where they cannot save the one that was chosen.

        Those that are `there`, where the disk hangs, give what nobody else can, and write nothing.
        No step that all have finished is given up for it: who has finished one can give it.
        """
        decision = self._writing.decide(boards, there)
        if isinstance(decision, NoPlan) or not self._writing.origin < decision.step < self._writing.step:
            return None
        return decision
