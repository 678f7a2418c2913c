"""The state machine of an incident, from the first failure to the verdict; no clock, socket or torch.

FREEZING   every live rank closes its door and tells where it stands
REGROUPING failed ranks get a new process, and all come to the chosen step with new process groups; whenever
           that fails, the same step is saved instead (PREPARING)
RECOVERED    all of them go on: the incident is over, and the job is not started again
PREPARING  an agent makes the temporary folder
DUMPING    the chosen holders bring themselves to the step and write
PUBLISHING an agent checks the files, renames the folder and replaces the tracker; where handlers of the
           script write what is saved, nothing is prepared, and one rank's handler gives it its name
FINDING    nothing can be saved, but the controller that is lost may have had it saved: an agent looks
ENDED      the verdict is out and every worker has been told to exit

Invariants: a step is chosen only when every live rank has answered or run out of time; a group that is on
disk is not written again at the same step; the publish is ordered only when every group is on disk. What may
follow which stage: `incident_state.TRANSITIONS`. Who makes and publishes the folder: `PublishTarget`; who is
given up: `Reassignment`; what can be recovered without a restart: `Regrouping`.
"""

from __future__ import annotations

from collections.abc import Collection

from adaptor.controller.dump import Writing
from adaptor.controller.failures import Failures
from adaptor.controller.freeze import FreezeState
from adaptor.controller.incident_orders import IncidentOrders
from adaptor.controller.incident_state import IncidentState, Stage
from adaptor.controller.membership import Membership
from adaptor.controller.outcome import Orders, Outcome
from adaptor.controller.plan import NoPlan, Plan
from adaptor.controller.prior_checkpoint import PriorCheckpointSearch
from adaptor.controller.publish_target import PublishTarget
from adaptor.controller.reassignment import STUCK_S, Reassignment
from adaptor.controller.regrouping import CannotRegroupError, FromNewcomer, Recoveries, Regrouping
from adaptor.controller.step_choice import NEVER_BEGUN, choose
from adaptor.protocol.messages import (
    BoardRecord,
    Hello,
    Joined,
    Phase,
    RegroupFailed,
    WriteFailed,
    Written,
)


class Incident:
    """Drives the stages of incident `number`.

    Args:
        membership: who is in the job, kept by the controller.
        failures: what the controller knows of the failure.
        opened_at, timeout_s: see `IncidentState`.
        store: host, port and secret of the store over which ranks form groups.
        awaited: nodes that may yet come to a controller that has taken the place of another.
        term: of the controller, 0 for the first.
        answer_s: how long ranks have for an answer; half of the time where it is 0.
        recoveries: the online recoveries before this incident.
    """

    def __init__(
        self,
        number: int,
        membership: Membership,
        failures: Failures,
        *,
        opened_at: float,
        timeout_s: float,
        store: tuple[str, int, bytes],
        awaited: Collection[int] = (),
        term: int = 0,
        answer_s: float = 0.0,
        recoveries: Recoveries | None = None,
    ) -> None:
        self.number = number
        self._membership = membership
        self._failures = failures
        self.state = IncidentState(opened_at, timeout_s, membership.alive)
        # Time is left for the dump: a rank that has not closed its door by then is no holder.
        half = timeout_s / 2
        took_over = term > 0
        self.freeze_state = FreezeState(
            self.state,
            membership,
            awaited=awaited,
            took_over=took_over,
            answer_s=min(half, answer_s or half),
        )
        self.writing = Writing(membership.layouts)
        self.target = PublishTarget(membership.agents)
        self.reassignment = Reassignment(self.state, membership.agents, self.writing, self.target)
        self.finding = PriorCheckpointSearch(
            self.freeze_state, self.writing, took_over, min(STUCK_S, timeout_s / 20)
        )
        self.regrouping = Regrouping(
            state=self.state,
            membership=membership,
            writing=self.writing,
            failures=failures,
            recoveries=recoveries or Recoveries(0.0),
            term=term,
        )
        self.orders = IncidentOrders(
            number=number,
            term=term,
            world_size=membership.world_size,
            node_of=membership.node_of,
            store=store,
            state=self.state,
            writing=self.writing,
            target=self.target,
            reassignment=self.reassignment,
        )
        self._rename_rank = -1

    @property
    def step(self) -> int:
        return self.writing.step

    def open(self, by_death: bool) -> Orders:
        """Ask every live rank to freeze. An exception may be the echo of a death that is not known yet.

        Where training has only just begun, another node's word of it may still be on its way.
        """
        if self.freeze_state.knows_all:
            return self._freeze()
        if by_death and self.freeze_state.never_begun:
            return self._end(NEVER_BEGUN)
        self.freeze_state.wait()
        return []

    def on_layout(self) -> Orders:
        return self._freeze() if self._waits and self.freeze_state.knows_all else []

    @property
    def _stacks(self) -> bool:
        """Return whether ranks are to tell where they stand: the job hangs."""
        return self._failures.hang_s > 0

    @property
    def _waits(self) -> bool:
        """Return whether nobody has been asked to freeze yet."""
        return self.freeze_state.waits and self.state.outcome is None

    def _freeze(self) -> Orders:
        self.freeze_state.ask()
        return self.orders.freeze(self.state.nodes, stacks=self._stacks) + self._decide_when_frozen()

    def on_hello(self, rank: int, node: int) -> Orders:
        """A rank that was not known to be there when others were asked to freeze."""
        if self.state.stage is not Stage.FREEZING or rank in self.state.nodes:
            return []
        self.state.nodes[rank] = node
        return [] if self.freeze_state.waits else self.orders.freeze([rank], stacks=self._stacks)

    def on_replay_complete(self) -> Orders:
        """Note that a node has repeated its reports: one node less is awaited."""
        if self._waits:
            return self._end(NEVER_BEGUN) if self.freeze_state.never_begun else []
        return self._decide_when_frozen()

    def on_frozen(self, rank: int, board: BoardRecord) -> Orders:
        if board.finished >= self.step and board.phase != Phase.UNREADABLE:
            # Else its main thread has not come through the door, or never will.
            self.reassignment.liveness.answer(rank)
        if self.state.stage is not Stage.FREEZING or rank not in self.state.nodes:
            return []
        self.freeze_state.record_answer(rank, board)
        return self._decide_when_frozen()

    def on_deaths(self, ranks: Collection[int]) -> Orders:
        """Take ranks out that have died, and were not known to be dead."""
        survivors = self.state.nodes.keys() & set(ranks)
        for rank in ranks:
            self.state.leave(rank)
        if self._waits:
            return self._end(NEVER_BEGUN) if self.freeze_state.never_begun else []
        if self.state.stage is Stage.REGROUPING and survivors:
            return self._regroup_again(f"rank {min(survivors)} has died, too", cold=False)
        if self.state.stage is Stage.FREEZING:
            return self._decide_when_frozen()
        if self.state.stage is Stage.DUMPING and not self.writing.taking_part.isdisjoint(ranks):
            self.writing.failures = 0
            return self._dump_again()
        if self.state.stage is Stage.PUBLISHING and self._rename_rank in ranks:
            return self._lose(
                f"rank {self._rename_rank} has died while its handler gave step {self.step} its name"
            )
        return []

    def on_agent_lost(self, node: int) -> Orders:
        """The agent of `node` is gone; the deaths of its ranks were told before."""
        if self.state.stage is Stage.REGROUPING:
            return self._fall_back(f"node {node} is lost")
        if node != self.target.publisher or self.state.stage in (Stage.FINDING, Stage.ENDED):
            return []
        self.target.hand_over()
        if self.state.stage is Stage.PREPARING:
            return [self.orders.prepare()]
        return [self.orders.publish()] if self.state.stage is Stage.PUBLISHING else []

    def on_prepared(self, folder: str, reason: str, number: int) -> Orders:
        if self.state.stage is not Stage.PREPARING or number != self.target.number:
            return []
        if reason:
            return [self.orders.prepare()] if self.target.refuse(reason) else self._lose(reason)
        self.target.path, self.target.written = folder, number
        self.state.move(Stage.DUMPING)
        return self._dump_again()

    def on_written(self, message: Written, now: float) -> Orders:
        if self.state.stage is not Stage.DUMPING or not self.writing.awaits(message):
            return []
        self.writing.take(message)
        self.on_progress(self.state.nodes.get(message.rank, -1), now)  # who takes no part may say so, too
        if self.writing.pending:
            return []
        self.state.move(Stage.PUBLISHING)
        if not self.writing.uses_script_handlers:
            return [self.orders.publish()]
        self._rename_rank = self.writing.rename_rank(self.state.nodes)
        return [self.orders.rename(self._rename_rank)]

    def on_write_failed(self, message: WriteFailed) -> Orders:
        self.writing.doubt(message)
        if message.rank in self.state.boards and not message.board.provides(self.step):
            # It will not come to that step any more; with a local copy it still gives the one before.
            self.freeze_state.record_answer(message.rank, message.board)
        if self.state.stage is not Stage.DUMPING or not self.writing.awaits(message):
            return []
        if self.writing.fails_for_good(message):
            return self._lose(f"{message.group} could not be written: {message.reason}")
        return self._dump_again()

    def on_published(self, step: int) -> Orders:
        if self.state.stage is Stage.FINDING:
            return self._end(self.finding.found(step))
        if self.state.stage is not Stage.PUBLISHING:
            return []
        step = max(self.step, step)
        return self._end(Outcome("saved", step, self.freeze_state.further(step)))

    def on_renamed(self, rank: int, reason: str) -> Orders:
        if self.state.stage is not Stage.PUBLISHING or rank != self._rename_rank:
            return []
        return self._lose(reason) if reason else self.on_published(self.step)

    def on_publish_failed(self, reason: str, number: int) -> Orders:
        if number != self.target.number:
            return []
        if self.state.stage is Stage.FINDING:
            self.finding.found_nothing()
        if self.state.stage is not Stage.PUBLISHING:
            return []
        return [self.orders.publish()] if self.target.refuse(reason) else self._lose(reason)

    def on_newcomer(self, message: FromNewcomer) -> Orders:
        """The new process of a rank says something, or has ended."""
        if self.state.stage is not Stage.REGROUPING:
            return []
        self.on_present(message.rank)
        if isinstance(message, Hello):
            if not self.regrouping.hello(message):
                return []
            return self.orders.regroup([message.rank], self.regrouping.replaced, self.regrouping.timeout_s)
        reason = self.regrouping.on_newcomer(message)
        return (
            self._regroup_again(f"the new process of rank {message.rank} {reason}", cold=True)
            if reason
            else []
        )

    def on_status(self, rank: int) -> Orders:
        """Take the status of a failed process, by which a fault that comes again is recognised."""
        self.regrouping.has_ended(rank)
        if self.state.stage is Stage.REGROUPING:
            try:
                self.regrouping.require_possible(self.step)
            except CannotRegroupError as error:
                return self._fall_back(str(error))
        return []

    def on_told_to_end(self) -> Orders:
        """Somebody wants a rank, or an agent, to end."""
        if self.state.stage is Stage.REGROUPING:
            return self._fall_back(self._failures.told_to_end)
        return []

    def on_present(self, rank: int) -> None:
        """`rank` answers."""
        if self.state.stage is Stage.REGROUPING:
            self.regrouping.roll_call.answer(rank)

    def _call_the_roll(self, now: float) -> Orders:
        """Replace those that were asked in vain, or save without them; ask all others."""
        regrouping = self.regrouping
        survivors, newcomers = regrouping.missing()
        if survivors:
            regrouping.hanging.update(survivors)
            return self._regroup_again(f"rank {survivors[0]} does not answer any more", cold=False)
        if newcomers:
            return self._regroup_again(f"the new process of rank {newcomers[0]} does not answer", cold=True)
        regrouping.roll_call.begin_round({*self.state.nodes, *regrouping.newcomers}, now)
        return self.orders.ask_for(sorted({*self.state.nodes, *regrouping.joining}))

    def on_joined(self, message: Joined) -> Orders:
        self.on_present(message.rank)
        if self.state.stage is not Stage.REGROUPING or not self.regrouping.awaits(message):
            return []
        if reason := self.regrouping.join(message):
            return self._fall_back(f"rank {message.rank}: {reason}")
        if self.regrouping.is_complete:
            self.state.end(Outcome("recovered", self.step, ""))
        return []

    def on_regroup_failed(self, message: RegroupFailed) -> Orders:
        if self.state.stage is not Stage.REGROUPING or not self.regrouping.awaits(message):
            return []
        reason = f"rank {message.rank}: {message.reason}"
        if not message.hangs:
            return self._fall_back(reason)
        self.regrouping.hanging.add(message.rank)
        return self._regroup_again(reason, cold=False)

    def on_progress(self, node: int, now: float) -> None:
        """The save moves: what it takes is not counted against the time of the incident."""
        if self.state.stage in (Stage.DUMPING, Stage.PUBLISHING):
            self.state.deadline = max(self.state.deadline, now + self.state.timeout_s)
            self.reassignment.moved(node)

    def on_tick(self, now: float) -> Orders:
        if self.state.outcome is not None:
            return []
        if self.freeze_state.waits:
            return self._go_on_without_layouts(now) if self.freeze_state.is_late(now) else []
        if self.state.stage is Stage.FINDING:
            return self._look_again(now)
        if self.state.stage is Stage.REGROUPING:
            if self.regrouping.is_late(now):
                return self._fall_back(f"not done after {self.regrouping.timeout_s:g} s (TTP_ONLINE)")
            if self.regrouping.roll_call.is_due(now):
                return self._call_the_roll(now)
        if now >= self.state.deadline - self.finding.patience_s:
            return self._run_out_of_time()
        if self.state.stage is Stage.FREEZING and self.freeze_state.expire_unanswered(now):
            return self._decide_when_frozen()
        if self.state.stage is Stage.DUMPING and self.reassignment.liveness.is_due(now):
            if self.reassignment.leave_the_stuck():
                return self._dump_again()
            # Nothing moves: an order that they have followed already costs nothing, and is answered.
            return self.orders.freeze(self.reassignment.liveness.call(self.writing.taking_part))
        if self.state.stage in (Stage.PREPARING, Stage.DUMPING, Stage.PUBLISHING):
            overdue = self.reassignment.overdue(now, dumping=self.state.stage is Stage.DUMPING)
            return self._go_on_elsewhere(overdue) if overdue else []
        return []

    def _run_out_of_time(self) -> Orders:
        if self.state.stage is Stage.DUMPING and (reason := self.reassignment.only_the_stuck):
            return self._lose(reason, unheld=True)
        state = self.state.stage.name.lower()
        return self._lose(f"not done after {self.state.timeout_s:g} s (TTP_OT) in state {state}")

    def _go_on_elsewhere(self, overdue: set[int]) -> Orders:
        """Have other nodes do what `overdue` ones were to do with the save folder, where they can."""
        if self.state.stage is Stage.PUBLISHING:
            return [self.orders.publish()] if self.reassignment.publish(overdue) else []
        if self.state.stage is Stage.PREPARING:
            return [self.orders.prepare()] if self.reassignment.prepare(overdue) else []
        if (again := self.reassignment.dump(overdue)) is None:
            return []
        return self._order_dump(again) if again.step == self.step else self._begin(again)

    def _decide_when_frozen(self) -> Orders:
        is_frozen = self.state.stage is Stage.FREEZING and self.freeze_state.is_over
        return self._recover_or_save() if is_frozen else []

    def _go_on_without_layouts(self, now: float) -> Orders:
        """Ask those who are there: they know whether a step has finished."""
        if self.freeze_state.never_begun or not self._membership.layouts:
            return self._end(NEVER_BEGUN)
        self.freeze_state.hurry(now + STUCK_S)
        return self._freeze()

    def _recover_or_save(self) -> Orders:
        """Take the newest step that there is: recover online from it, or begin to save it for a restart."""
        decision = choose(self.state, self.freeze_state, self.writing)
        if not isinstance(decision, Plan):
            return self._end(decision)
        if self.state.stage is Stage.FREEZING and self.regrouping.is_armed:
            try:
                return self._regroup(decision, cold=False)
            except CannotRegroupError as error:
                self.regrouping.why_not = str(error)
        return self._begin(decision)

    def _regroup(self, decision: Plan, *, cold: bool) -> Orders:
        """Have failed ranks replaced, and all come to one step with new process groups: that of `decision`,
        if all of them can.

        Raises:
            CannotRegroupError: says why not; nothing has changed.
        """
        regrouping, state = self.regrouping, self.state
        again = self.writing.decide(state.boards, step=regrouping.common_step(decision.step))
        decision = again if isinstance(again, Plan) else decision
        regrouping.require_possible(decision.step)
        replaced = regrouping.plan(decision.step)
        if state.stage is Stage.FREEZING:
            state.move(Stage.REGROUPING)
        for rank in regrouping.unfit(decision.step):
            state.leave(rank)
        self.writing.begin(decision)
        self.writing.begin_attempt(decision)
        started = regrouping.begin_attempt(replaced)
        self.freeze_state.let_through(state.nodes, decision.step)
        self.freeze_state.take_back(state.nodes, decision.step)
        orders = self.orders.replace(started, cold=cold)
        return orders + self.orders.regroup(state.nodes, replaced, regrouping.timeout_s)

    def _regroup_again(self, reason: str, *, cold: bool) -> Orders:
        """Try the online recovery of the same step once more; if none is left, save the step."""
        decision = self.writing.decide(self.state.boards)
        if self.regrouping.may_try_again and isinstance(decision, Plan) and decision.step == self.step:
            try:
                return self._regroup(decision, cold=cold)
            except CannotRegroupError as error:
                reason = f"{reason}; {error}"
        return self._fall_back(reason)

    def _fall_back(self, reason: str) -> Orders:
        """Save the step, which all survivors still have."""
        self.regrouping.why_not = reason
        decision = choose(self.state, self.freeze_state, self.writing)
        return self._begin(decision) if isinstance(decision, Plan) else self._end(decision)

    def _begin(self, decision: Plan) -> Orders:
        self.writing.begin(decision)
        if self.writing.uses_script_handlers:
            self.state.move(Stage.DUMPING)
            return self._dump_again()
        self.state.move(Stage.PREPARING)
        self.target.choose(self.state.nodes[min(order.writer for order in decision.groups)])
        return [self.orders.prepare()]

    def _dump_again(self) -> Orders:
        """Plan for the groups that are not on disk: at the same step if possible, else from the start."""
        again = self.writing.rest(self.state.boards)
        return self._recover_or_save() if isinstance(again, NoPlan) else self._order_dump(again)

    def _order_dump(self, again: Plan) -> Orders:
        self.writing.begin_attempt(again)
        self.freeze_state.let_through(self.writing.taking_part, self.step)
        return self.orders.dump()

    def _lose(self, reason: str, *, unheld: bool = False) -> Orders:
        return self._end(Outcome("lost", -1, reason, unheld))

    def _end(self, outcome: Outcome) -> Orders:
        if outcome.kind != "saved" and outcome != NEVER_BEGUN and self.finding.may_find:
            self.state.move(Stage.FINDING)
            self.finding.otherwise = outcome
            self.target.number += 1
            return [self.orders.find(self.finding.step)]
        self.state.end(outcome)
        return []

    def _look_again(self, now: float) -> Orders:
        if self.finding.is_over(now, self.state.deadline):
            assert self.finding.otherwise is not None
            self.state.end(self.finding.otherwise)
            return []
        return [self.orders.find(self.finding.step)] if self.finding.is_due() else []
