"""Drives the save of an incident's step: the folder, the dump, its publication; pure, the time is an
argument.

Invariants: a group that is on disk is not written again at the same step; the publish is ordered only when
every group is on disk. The agent of the folder: `PublishTarget`.

`Reassignment` reassigns the work of ranks and nodes without progress. `IoStallDetector` names the nodes whose
work on the save folder stands still: a disk may hang on one node alone while all processes of the node
answer. `LivenessProbe` asks the ranks of a dump that stands still for an answer: a rank with an answer is at
work, or waits for another rank or for a disk; a silent rank is stuck.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from adaptor.controller.freeze import FreezeState, choose
from adaptor.controller.incident_state import (
    IncidentOutcome,
    IncidentState,
    Order,
    Orders,
    Stage,
    unresponsive_words,
)
from adaptor.controller.plan import NoPlan, Plan
from adaptor.protocol.messages import BoardRecord, Prepare, Publish, Rename, WriteFailed, Written


class IoStallDetector:
    """The progress of each node's work on the save folder, which may stand still for `patience_s`."""

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
    """Asks the ranks of a dump that stands still for `patience_s` for an answer, and waits as long.

    Ranks in `unanswered_twice` were asked a second time without an answer: their time is over.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._moved = True
        self._due_at = 0.0
        self.unanswered_once: set[int] = set()
        self.unanswered_twice: set[int] = set()

    def moved(self) -> None:
        """Note progress of the dump: no rank is asked for a while."""
        self._moved = True

    def answer(self, rank: int) -> None:
        """Note an answer of `rank`, so that the rank is asked for its shards again."""
        self.unanswered_once.discard(rank)
        self.unanswered_twice.discard(rank)

    def is_due(self, time_now: float) -> bool:
        """Return True if nothing has moved for `patience_s` since ranks were last asked."""
        if self._moved:
            self._moved = False
            self.unanswered_once, self.unanswered_twice = set(), set()
            self._due_at = time_now + self._patience_s
        if time_now < self._due_at:
            return False
        self._due_at = time_now + self._patience_s
        return True

    def call(self, ranks: Iterable[int]) -> list[int]:
        """Note that `ranks` are asked; return them in order."""
        self.unanswered_twice = self.unanswered_once
        self.unanswered_once = set(ranks)
        return sorted(self.unanswered_once)


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
        """Give up the ranks without an answer if others can give their shards; return True if so."""
        stuck = self.liveness.unanswered_once
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
        stuck = self.liveness.unanswered_twice
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
        """Return True if a writer on an `overdue` node may wait for a holder on another node."""
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


STAGES = (Stage.PREPARING, Stage.DUMPING, Stage.PUBLISHING)


class Saving:
    """The save of one incident; `outcome` is its end."""

    def __init__(self, state: IncidentState, freeze_state: FreezeState) -> None:
        self._state = state
        self._freeze_state = freeze_state
        self._writing = state.writing
        self._target = state.target
        self.reassignment = Reassignment(state)
        self._rename_rank = -1
        self.outcome: IncidentOutcome | None = None

    @property
    def _stage(self) -> Stage:
        return self._state.stage

    def begin(self, decision: Plan) -> Orders:
        """Save the step of `decision`; groups of the step that are on disk stay there."""
        has_begun_before = self._target.path and decision.step == self._writing.step
        if has_begun_before:  # ranks that were given up have answered since
            self._state.move(Stage.DUMPING)
            return self._dump_again()
        self._writing.begin(decision)
        if self._writing.uses_script_handlers:
            self._state.move(Stage.DUMPING)
            return self._dump_again()
        self._state.move(Stage.PREPARING)
        self._target.choose(self._state.nodes[min(order.writer for order in decision.groups)])
        return [self._prepare()]

    def on_deaths(self, ranks: Collection[int]) -> Orders:
        """Act on survivors that have died, or have been taken out."""
        if self._stage is Stage.DUMPING and not self._writing.taking_part.isdisjoint(ranks):
            self._writing.failures = 0
            return self._dump_again()
        if self._stage is Stage.PUBLISHING and self._rename_rank in ranks:
            return self._lose(
                f"rank {self._rename_rank} has died while its handler gave step {self._writing.step} its name"
            )
        return []

    def on_agent_lost(self, node: int) -> Orders:
        """Act on the loss of the agent of `node`; the deaths of its ranks were reported before."""
        if node != self._target.publisher:
            return []
        self._target.hand_over()
        if self._stage is Stage.PREPARING:
            return [self._prepare()]
        return [self._publish()] if self._stage is Stage.PUBLISHING else []

    def on_prepared(self, folder: str, reason: str, number: int) -> Orders:
        """Order the dump into `folder`, or a folder from another agent if a `reason` says why this one
        failed.
        """
        if self._stage is not Stage.PREPARING or number != self._target.number:
            return []
        if reason:
            return [self._prepare()] if self._target.refuse(reason) else self._lose(reason)
        self._target.path, self._target.written = folder, number
        self._state.move(Stage.DUMPING)
        return self._dump_again()

    def on_written(self, message: Written, time_now: float) -> Orders:
        """Note that a group is on disk; order the publication after the last group."""
        if self._stage is not Stage.DUMPING or not self._writing.awaits(message):
            return []
        self._writing.take(message)
        self.on_progress(
            self._state.nodes.get(message.rank, -1), time_now
        )  # also for a rank that takes no part
        if self._writing.pending:
            return []
        self._state.move(Stage.PUBLISHING)
        if not self._writing.uses_script_handlers:
            return [self._publish()]
        self._rename_rank = self._writing.rename_rank(self._state.nodes)
        return [self._state.order(self._rename_rank, Rename(self._state.number, self._writing.step))]

    def on_write_failed(self, message: WriteFailed) -> Orders:
        """Order the dump again without the failed rank, or give the save up."""
        self._writing.doubt(message)
        if message.rank in self._state.boards and not message.board.provides(self._writing.step):
            # The rank will not come to the step any more; with a local copy it still gives the step before.
            self._freeze_state.record_answer(message.rank, message.board)
        if self._stage is not Stage.DUMPING or not self._writing.awaits(message):
            return []
        if self._writing.fails_for_good(message):
            return self._lose(f"{message.group} could not be written: {message.reason}")
        return self._dump_again()

    def on_published(self, step: int) -> Orders:
        """Note that the checkpoint has its name."""
        # The answer may come after the time limit, while all ranks go on from the step online.
        if self._stage in (Stage.PUBLISHING, Stage.REGROUPING):
            step = max(self._writing.step, step)
            self.outcome = IncidentOutcome("saved", step, self._freeze_state.further(step))
        return []

    def on_renamed(self, rank: int, reason: str) -> Orders:
        """Note that the handler of the script on `rank` has named the checkpoint, or failed."""
        if self._stage is not Stage.PUBLISHING or rank != self._rename_rank:
            return []
        return self._lose(reason) if reason else self.on_published(self._writing.step)

    def on_publish_failed(self, reason: str) -> Orders:
        """Order the publication from another agent, or give the save up for this `reason`."""
        if self._stage is not Stage.PUBLISHING:
            return []
        return [self._publish()] if self._target.refuse(reason) else self._lose(reason)

    def on_progress(self, node: int, time_now: float) -> None:
        """Note that `node` has made progress with the save; the time limit of the incident starts anew."""
        if self._stage in (Stage.DUMPING, Stage.PUBLISHING):
            self._state.prolong()
            self.reassignment.moved(node)

    def on_tick(self, time_now: float) -> Orders:
        """Look for ranks and nodes without progress, within the time limit of the incident."""
        is_dumping = self._stage is Stage.DUMPING
        if is_dumping and self.reassignment.liveness.is_due(time_now):
            if self.reassignment.leave_the_stuck():
                return self._dump_again()
            # Nothing moves: a repeated order costs nothing, and is answered.
            return self._state.freeze(self.reassignment.liveness.call(self._writing.taking_part))
        overdue = self.reassignment.overdue(time_now, dumping=is_dumping)
        return self._go_on_elsewhere(overdue) if overdue else []

    def run_out_of_time(self) -> Orders:
        """End the save, because the time of the incident is over."""
        if self._stage is Stage.DUMPING and (reason := self.reassignment.only_the_stuck):
            return self._lose(reason, unheld=True)
        stage = self._stage.name.lower()
        return self._lose(f"not done after {self._state.timeout_s:g} s (TTP_OT) in state {stage}")

    def _go_on_elsewhere(self, overdue: set[int]) -> Orders:
        """Give the work of `overdue` nodes with the save folder to other nodes, if possible."""
        if self._stage is Stage.PUBLISHING:
            return [self._publish()] if self.reassignment.publish(overdue) else []
        if self._stage is Stage.PREPARING:
            return [self._prepare()] if self.reassignment.prepare(overdue) else []
        if self.reassignment.may_be_held_up(overdue):
            return self._dump_again()  # gathers the shards: no holder needs its disk
        if (new_plan := self.reassignment.dump(overdue)) is None:
            return []
        return self._order_dump(new_plan) if new_plan.step == self._writing.step else self.begin(new_plan)

    def _dump_again(self) -> Orders:
        """Plan the groups that are not on disk: at the same step if possible, else from the start."""
        new_plan = self._writing.rest(self._state.boards)
        if not isinstance(new_plan, NoPlan):
            return self._order_dump(new_plan)
        decision = choose(self._state, self._freeze_state)
        if isinstance(decision, Plan):
            return self.begin(decision)
        self.outcome = decision
        return []

    def _order_dump(self, new_plan: Plan) -> Orders:
        self._writing.begin_attempt(new_plan)
        self._freeze_state.let_through(self._writing.taking_part, self._writing.step)
        writing, state = self._writing, self._state
        self.reassignment.liveness.moved()
        if not writing.uses_script_handlers:  # handlers report no progress
            self.reassignment.io_stalls.expect(
                state.nodes[order.writer] for order in writing.pending.values()
            )
        orders = writing.orders(state.number, self._target.path, state.store, state.timeout_s)
        return [state.order(rank, order) for rank, order in orders.items()]

    def _prepare(self) -> Order:
        """Return the order to make the temporary folder."""
        state, writing, target = self._state, self._writing, self._target
        self.reassignment.io_stalls.expect([target.publisher])
        order = Prepare(
            state.number,
            state.membership.save_folder,
            writing.step,
            state.term,
            target.number,
            first=state.term == 0 and target.is_first,
        )
        return state.ask(order, target.publisher)

    def _publish(self) -> Order:
        """Return the order to check the files, rename the folder and replace the tracker."""
        state, writing, target = self._state, self._writing, self._target
        self.reassignment.io_stalls.expect([target.publisher])
        order = Publish(
            incident=state.number,
            save_folder=state.membership.save_folder,
            step=writing.step,
            files=writing.all_files,
            writers=writing.holders,
            world_size=state.membership.world_size,
            term=state.term,
            number=target.number,
            written=target.written,
        )
        return state.ask(order, target.publisher)

    def _lose(self, reason: str, *, unheld: bool = False) -> Orders:
        self.outcome = IncidentOutcome("lost", -1, reason, unheld)
        return []
