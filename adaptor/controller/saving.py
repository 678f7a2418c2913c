"""Drives the save of an incident's step: the folder, the dump, its publication; pure.

Invariants: a group that is on disk is not written again at the same step; the publish is ordered only when
every group is on disk. The agent of the folder: `PublishTarget`; ranks and nodes that are given up:
`Reassignment`.
"""

from __future__ import annotations

from collections.abc import Collection

from adaptor.controller.freeze import FreezeState, choose
from adaptor.controller.incident_state import IncidentOutcome, IncidentState, Order, Orders, Stage
from adaptor.controller.plan import NoPlan, Plan
from adaptor.controller.reassignment import Reassignment
from adaptor.protocol.messages import Prepare, Publish, Rename, WriteFailed, Written

STAGES = (Stage.PREPARING, Stage.DUMPING, Stage.PUBLISHING)


class Saving:
    """The save of one incident.

    Attributes:
        outcome: the end of the save; None until then
    """

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
        """Save the step of `decision`."""
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
        """Order the dump into `folder`, or the folder from another agent if a `reason` says why the first
        agent failed.

        `number` is the number of the order to prepare; answers to older orders are ignored.
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
        """Note that the handler of the script on `rank` has named the checkpoint, or failed for a
        `reason`.
        """
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
            writing.save,
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
            save=writing.save,
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
