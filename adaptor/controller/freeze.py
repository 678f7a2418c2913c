"""The freeze of an incident, and the choice of the step that is saved; pure, without a clock.

A step is chosen only when every live rank has answered, or has run out of time. A rank in an update of its
optimizer, or in the publication of a regular save, answers afterwards. If training has only just begun, the
layouts of some ranks may still be on their way, or lost with their node.

`choose` decides between a plan to save and an outcome. `PriorCheckpointSearch` looks for a checkpoint that a
lost controller may have had saved.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import msgspec

from adaptor.controller.incident_state import (
    IncidentOutcome,
    IncidentState,
    Order,
    unreadable_words,
    unresponsive_words,
)
from adaptor.controller.plan import NoPlan, Plan, may_have_begun
from adaptor.protocol.messages import BoardRecord, Find, Phase, ScriptStage

# A process that dies closes its connections before its parent learns of the death: freeing some GB takes a
# second. Ranks that finish together differ by less.
LAYOUT_WAIT_S = 2.0
# The time for the answer of a dispensable rank when the job is told to end.
ANSWER_S = 5.0
# The time for the answer of any rank in a hang: the rank has stood still for long, is in no short update, and
# answers at once or never. Before, its agent looks at its stacks (2 s, `agent.processes.LOOK_S`), the rank
# looks itself (1 s, `worker.processor`) and asks its device (twice 1 s, `devices.accelerator`). On a busy
# machine each takes all of its time, and a rank that counts as silent is named as the cause.
HANG_ANSWER_S = 10.0


class FreezeState:
    """The freeze of one incident.

    Args:
        awaited: nodes that have not yet repeated their reports to a successor of a lost controller.
        hangs: the job does not move; a rank has HANG_ANSWER_S for its answer instead of half of the time for
            the incident. A rank without an answer is no holder of a shard (`leave_the_silent`).
    """

    def __init__(self, state: IncidentState, awaited: Collection[int], *, hangs: bool) -> None:
        self._state = state
        self._membership = state.membership
        self._awaited = awaited
        half = state.timeout_s / 2  # the other half is for the dump
        self._answers_by = state.opened_at + (min(half, HANG_ANSWER_S) if hangs else half)
        self._hurries_at = math.inf
        self._explained_by = 0.0  # 0: layouts are not awaited
        self._newest = -1

    @property
    def knows_all(self) -> bool:
        """Return True if the layout of every rank of the job is known."""
        return len(self._membership.layouts) == self._membership.world_size

    @property
    def waits(self) -> bool:
        """Return True while no rank has been asked, because layouts are awaited."""
        return self._explained_by > 0

    @property
    def stage(self) -> int:
        """Return the stage that the scripts of all ranks have reached, dead ranks included."""
        boards = {**self._membership.boards, **self._state.boards}
        if not self.knows_all or len(boards) < self._membership.world_size:
            return ScriptStage.TRAINING
        return min(board.stage for board in boards.values())

    @property
    def dead_had_finished(self) -> bool:
        """Return True if the scripts of all dead ranks had finished."""
        membership = self._membership
        boards = [membership.boards.get(rank) for rank in (*membership.dead, *membership.dying)]
        return bool(boards) and all(
            board is not None and board.stage == ScriptStage.FINISHED for board in boards
        )

    @property
    def never_begun(self) -> bool:
        """Return True if training had not begun on some rank, and no awaited node can know otherwise."""
        if self._awaited or self.had_begun:
            return False
        if self._membership.unbegun or not self._membership.layouts:
            return True
        return self._state.term > 0 and not self._state.nodes.keys() <= self._membership.layouts.keys()

    @property
    def had_begun(self) -> bool:
        """Return True if training had begun on every rank, because a spare node has joined it."""
        return any(self._membership.owners.values())

    @property
    def unknown(self) -> list[int]:
        """Return the ranks whose layout is not known."""
        membership = self._membership
        return [rank for rank in range(membership.world_size) if rank not in membership.layouts]

    @property
    def is_over(self) -> bool:
        """Return True if every live rank has answered, and no node is awaited."""
        nodes, boards = self._state.nodes, self._state.boards
        if len(boards) < len(nodes) or self.waits or self._awaited:
            return False
        return nodes.keys() <= boards.keys()

    def wait(self) -> None:
        """Wait for all layouts: an exception may follow from a death that is not reported yet."""
        self._explained_by = self._state.opened_at + LAYOUT_WAIT_S

    def ask(self) -> None:
        """Note that ranks are asked to freeze now."""
        self._explained_by = 0.0

    def hurry(self, time_now: float) -> None:
        """Wait only ANSWER_S longer for dispensable ranks."""
        self._hurries_at = min(self._hurries_at, time_now + ANSWER_S)

    def hurries(self, time_now: float) -> bool:
        """Return True if only indispensable ranks are still awaited."""
        return time_now >= self._hurries_at

    def is_late(self, time_now: float) -> bool:
        """Return True if layouts have been awaited for long enough."""
        return self.waits and time_now >= self._explained_by

    def record_answer(self, rank: int, board: BoardRecord) -> None:
        """Keep the `board` of a rank that is frozen, or has nothing newer to give."""
        self._state.boards[rank] = board
        self._newest = max(self._newest, _newest(board))

    def is_over_time(self, time_now: float) -> bool:
        """Return True if no answer is awaited any longer."""
        return time_now >= self._answers_by

    def leave_the_silent(self) -> None:
        """Give up the ranks without an answer: silent ranks are no holders."""
        silent = [rank for rank in self._state.nodes if rank not in self._state.boards]
        self._state.silent += silent
        for rank in silent:
            self._state.leave(rank)

    def further(self, step: int) -> str:
        """Return a note for the verdict if `step` is saved and a rank had finished a later step, else "".

        Ranks of a job with local copies may have gone back, and the rank that was ahead may be dead by now.
        """
        finished = max([self._newest, *map(_newest, self._state.boards.values())])
        return "" if finished <= step else f"step {finished} was not finished on every rank"

    @property
    def newest_told(self) -> int:
        """Return the newest step that any rank, dead ones included, had finished or left when it answered."""
        return max([self._newest, *map(_newest, self._membership.boards.values())])

    @property
    def newest_begun(self) -> int:
        """Return the newest step that any rank may have begun, a dead one if all were at its door."""
        boards = [*self._state.boards.values(), *self._membership.boards.values()]
        ahead = max((board.ahead for board in boards), default=-1)
        return max(self.newest_told, ahead if may_have_begun(ahead, boards) else -1)

    def let_through(self, ranks: Iterable[int], step: int) -> None:
        """Note that `ranks` go through the door to `step`; without a local copy no rank can go back."""
        for rank in ranks:
            board = self._state.boards[rank]
            if board.finished < step:
                oldest = board.finished if self._membership.layouts[rank].has_local_copy else step
                self._state.boards[rank] = msgspec.structs.replace(
                    board, phase=Phase.RUNNING, oldest=oldest, finished=step
                )

    def take_back(self, ranks: Iterable[int], step: int) -> None:
        """Note that ranks beyond `step` put back its state from their local copies."""
        for rank in ranks:
            board = self._state.boards[rank]
            if board.finished > step or board.phase == Phase.BROKEN:
                self._state.boards[rank] = msgspec.structs.replace(
                    board, phase=Phase.RUNNING, oldest=step, finished=step
                )


def _newest(board: BoardRecord) -> int:
    return board.ahead if board.phase == Phase.BROKEN else board.finished


FINISHED = IncidentOutcome("nothing", -1, "the training was over")
NEVER_BEGUN = IncidentOutcome(
    "nothing", -1, "no step has finished since this start: training had not begun on every rank"
)


def choose(state: IncidentState, freeze_state: FreezeState) -> Plan | IncidentOutcome:
    """Return the plan to save the newest possible step, or the outcome if no step can be saved."""
    origin = state.writing.origin
    if not freeze_state.knows_all:
        if freeze_state.newest_begun <= origin and not freeze_state.had_begun:
            return NEVER_BEGUN
        return lost_layouts(freeze_state)
    if freeze_state.stage == ScriptStage.FINISHED:
        return FINISHED
    decision = state.writing.decide(state.boards)
    if isinstance(decision, NoPlan):
        if state.boards and freeze_state.newest_begun <= origin:
            return _nothing_since(origin)
        if state.writing.newest is not None:
            return IncidentOutcome("lost", -1, decision.reason)
        useless = unresponsive_words(state.given_up) + unreadable_words(state.boards)
        return IncidentOutcome("lost", -1, decision.reason + useless, unheld=True)
    return _nothing_since(origin) if decision.step <= origin else decision


def lost_layouts(freeze_state: FreezeState) -> IncidentOutcome:
    """Return the outcome where ranks hold state, and the layouts of some ranks are not known."""
    unknown_ranks = ", ".join(map(str, freeze_state.unknown))
    return IncidentOutcome("lost", -1, f"what rank {unknown_ranks} held is not known: its message was lost")


def _nothing_since(origin: int) -> IncidentOutcome:
    reason = f"no step has finished since step {origin}" if origin else "no step has finished"
    return IncidentOutcome("nothing", origin, reason)


class PriorCheckpointSearch:
    """The search for a checkpoint of a lost controller, for which another agent may still publish: the search
    is repeated.

    Args:
        patience_s: the duration of the search, within the time of the incident.

    Attributes:
        otherwise: the outcome if the search finds nothing
    """

    def __init__(self, state: IncidentState, freeze_state: FreezeState, patience_s: float) -> None:
        self._state = state
        self._freeze_state = freeze_state
        self._writing = state.writing
        self.patience_s = patience_s if state.term else 0.0
        self.otherwise: IncidentOutcome | None = None
        self._until = 0.0
        self._found_nothing = False

    @property
    def may_find(self) -> bool:
        """Return True if the lost controller may have had a step saved, unknown to its successor."""
        return (
            self._state.term > 0
            and bool(self._state.membership.layouts)
            and not self._writing.uses_script_handlers
        )

    def order(self) -> Order:
        """Return the order to the agent of this controller to look for a checkpoint that loses no step."""
        state, step = self._state, max(self._freeze_state.newest_told, self._writing.origin + 1)
        return state.ask(
            Find(state.number, self._state.membership.save_folder, step, state.target.number), state.home
        )

    def found(self, step: int) -> IncidentOutcome:
        """Return the outcome for `step`, found on disk, perhaps earlier than the newest known step."""
        newest_reported, newest_begun = self._freeze_state.newest_told, self._freeze_state.newest_begun
        if newest_reported > step:
            return IncidentOutcome("saved", step, f"step {newest_reported} was not finished on every rank")
        return IncidentOutcome(
            "saved", step, f"step {newest_begun} may have begun" if newest_begun > step else ""
        )

    def found_nothing(self) -> None:
        """Note that an agent has looked, and found nothing."""
        self._found_nothing = True

    def is_over(self, time_now: float, deadline: float) -> bool:
        """Return True when the search is over; an agent that does not answer has until `deadline`."""
        self._until = self._until or time_now + self.patience_s
        return time_now >= deadline or (self._found_nothing and time_now >= self._until)

    def is_due(self) -> bool:
        """Return True if an agent has looked, found nothing, and is to look again."""
        is_repeated, self._found_nothing = self._found_nothing, False
        return is_repeated
