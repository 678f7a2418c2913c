"""The state machine of an incident, from the first failure to the verdict; no clock, socket or torch.

FREEZING        every live rank closes its door and reports its board
PREPARING       an agent makes the temporary folder; in an online recovery failed ranks get new
                processes meanwhile
DUMPING         the chosen holders bring themselves to the step and write
PUBLISHING      an agent checks the files, renames the folder and replaces the tracker; where handlers of the
                script save, nothing is prepared, and the handler of one rank names the checkpoint
REGROUPING      the step is on disk (or could not be saved): survivors and new processes come to the step with
                new process groups; a further failure begins another attempt, or starts all workers again from
                the step
RECOVERED       all ranks go on: the incident is over, and the job is not started again
FINDING         nothing can be saved, but a lost controller may have had the step saved: an agent looks
ENDING_SCRIPTS  all ranks have finished their training: nothing is saved, and live ranks may end their scripts
ENDED           the verdict is out and every worker has been told to exit

Invariants: a step is chosen only when every live rank has answered or run out of time; a survivor is told to
leave its loop only when the step is on disk, or the save has failed. The order of the stages:
`incident_state.TRANSITIONS`. The save: `Saving`; the online recovery, beside the save: `Regrouping`.
"""

from __future__ import annotations

from collections.abc import Collection

from adaptor.controller.failures import Failures
from adaptor.controller.feasibility import Feasibility, Recoveries
from adaptor.controller.freeze import (
    FINISHED,
    NEVER_BEGUN,
    FreezeState,
    PriorCheckpointSearch,
    choose,
    lost_layouts,
)
from adaptor.controller.incident_state import IncidentOutcome, IncidentState, Orders, Stage
from adaptor.controller.membership import Membership
from adaptor.controller.newcomers import FromNewcomer
from adaptor.controller.plan import Plan
from adaptor.controller.regrouping import Regrouping
from adaptor.controller.save_attempts import PublishTarget, Writing
from adaptor.controller.saving import STAGES, STUCK_S, Saving
from adaptor.protocol.messages import (
    BoardRecord,
    EndScript,
    Joined,
    Phase,
    PlacesFilled,
    Prepared,
    Present,
    Progress,
    Published,
    PublishFailed,
    RegroupFailed,
    Renamed,
    ScriptStage,
    Starting,
    ToController,
    WriteFailed,
    Written,
)

# Between the end of a process and its report to the controller.
REPORT_S = 5.0


class Incident:
    """Drives the stages of incident `number`; `awaited` nodes have to repeat their reports to a successor."""

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
        home: int = 0,
        recoveries: Recoveries | None = None,
    ) -> None:
        self._failures = failures
        self._awaited = awaited
        recoveries = recoveries or Recoveries(0.0)
        self.state = IncidentState(
            number=number,
            term=term,
            home=home,
            store=store,
            membership=membership,
            opened_at=opened_at,
            timeout_s=timeout_s,
            writing=Writing(membership),
            target=PublishTarget(membership.agents, recoveries.folders),
            nodes=membership.alive,
        )
        self.freeze_state = FreezeState(self.state, awaited, hangs=self._hangs)
        if failures.told_to_end:
            self.freeze_state.hurry(opened_at)
        self._heed_corruption()
        # The last answer of `_needs_the_silent`, and the number of boards, nodes and layouts at that time.
        self._needs, self._needs_by = False, (-1, -1, -1)
        self._search = PriorCheckpointSearch(self.state, self.freeze_state, min(STUCK_S, timeout_s / 20))
        self.saving = Saving(self.state, self.freeze_state)
        self.regrouping = Regrouping(
            self.state, self.freeze_state, Feasibility(self.state, failures, recoveries)
        )

    @property
    def number(self) -> int:
        return self.state.number

    @property
    def step(self) -> int:
        return self.state.writing.step

    def open(self, by_exception: bool) -> Orders:
        """Ask every live rank to freeze; an exception may be the echo of a death that is not reported yet.

        If training has only just begun, the report of another node may still be on its way.
        """
        if self.freeze_state.knows_all:
            raised = self._failures.raised.values()
            had_finished = all(exception.stage == ScriptStage.FINISHED for exception in raised)
            if not by_exception:
                had_finished = self.freeze_state.dead_had_finished
            if self._failures.asked or self._hangs or not had_finished:
                return self._freeze()
            # Other ranks leave their last collective at the same time, and are asked when they have finished.
            self.freeze_state.wait()
            return self._freeze_where_nobody_lives()
        if not by_exception and self.freeze_state.never_begun:
            return self._end(NEVER_BEGUN)
        self.freeze_state.wait()
        return []

    def _heed_corruption(self) -> None:
        """Save no step on which holders differ, and nothing that a corrupt rank holds."""
        corruption, writing = self._failures.corruption, self.state.writing
        if corruption is not None:
            writing.corrupt, writing.newest = self._failures.corrupt, corruption.agreed

    def on_corruption(self) -> Orders:
        """Heed a corruption that is found while the incident is open; a save in progress begins again."""
        if self.state.outcome is not None:
            return []
        self._heed_corruption()
        if self.state.stage is Stage.FREEZING:
            return []
        writing, orders = self.state.writing, self.regrouping.cancel("a rank is corrupt, too")
        # No step on which holders differ is saved: such a dump begins again, whoever takes part in it.
        is_disputed = writing.newest is not None and writing.step > writing.newest
        excluded = writing.taking_part if is_disputed else self._failures.corrupt
        return self.go_on(orders + self.saving.on_deaths(excluded))

    def on_layout(self) -> Orders:
        """Ask for the freeze once the layouts of all ranks are known."""
        return self._freeze() if self._waits and self.freeze_state.knows_all else []

    @property
    def running_scripts(self) -> list[int]:
        """Return the live ranks that have raised nothing."""
        return [rank for rank in self.state.nodes if rank not in self._failures.raised]

    @property
    def _has_other_cause(self) -> bool:
        """Return True if the cause is neither a death nor an exception, or a node is lost."""
        failures = self._failures
        return bool(failures.asked or failures.lost or failures.corruption) or self._hangs

    @property
    def _hangs(self) -> bool:
        """Return True if the job hangs: ranks then report the positions of their main threads."""
        return self._failures.hang_s > 0

    @property
    def _waits(self) -> bool:
        """Return True if no rank has been asked to freeze yet."""
        return self.freeze_state.waits and self.state.outcome is None

    def _freeze(self) -> Orders:
        self.freeze_state.ask()
        return self.state.freeze(self.state.nodes, stacks=self._hangs) + self._decide_when_frozen()

    def _freeze_where_nobody_lives(self) -> Orders:
        """End the wait before the freeze if no live rank is left."""
        return self._freeze() if self.freeze_state.knows_all and not self.state.nodes else []

    def on_hello(self, rank: int, node: int) -> Orders:
        """Ask a rank to freeze that connects after the other ranks were asked."""
        if self.state.stage is not Stage.FREEZING or rank in self.state.nodes:
            return []
        self.state.nodes[rank] = node
        return [] if self.freeze_state.waits else self.state.freeze([rank], stacks=self._hangs)

    def on_replay_complete(self) -> Orders:
        """Note the repeated reports of a node: one node less is awaited."""
        if self._waits:
            return self._end(NEVER_BEGUN) if self.freeze_state.never_begun else []
        return self._decide_when_frozen()

    def on_frozen(self, rank: int, board: BoardRecord) -> Orders:
        """Take the answer of a rank to `Freeze`, to an order to come to a step, or to `EndScript`."""
        if self.state.stage is Stage.ENDING_SCRIPTS:
            if rank in self.state.nodes and board.phase == Phase.ENDED:
                # The worker ends its leftover threads TTP_OT from now; its death is reported a little later.
                self.state.deadline = max(
                    self.state.deadline, self.state.now + self.state.timeout_s + REPORT_S
                )
            return []
        if self.state.stage is not Stage.FREEZING:
            if board.finished >= self.step and board.phase != Phase.UNREADABLE:
                # Otherwise the main thread has not come through the door, or never will.
                self.saving.reassignment.liveness.answer(rank)
            self._take_back(rank, board)
            return []
        if rank not in self.state.nodes:
            return []
        self.freeze_state.record_answer(rank, board)
        return self._save() if self.freeze_state.is_over else []

    def _take_back(self, rank: int, board: BoardRecord) -> None:
        """Make a rank a holder again that was given up, and answers during the save.

        After a death it may be the only holder of a shard.
        """
        state, replaced = self.state, self.regrouping.newcomers.by_rank
        if state.stage in STAGES and rank in state.given_up and rank not in replaced:
            state.nodes[rank] = state.membership.node_of[rank]
            self.freeze_state.record_answer(rank, board)

    def on_deaths(self, ranks: Collection[int]) -> Orders:
        """Take out ranks that have died, and were not known to be dead."""
        survivors = self.state.nodes.keys() & set(ranks)
        for rank in ranks:
            self.state.leave(rank)
        if self.state.stage is Stage.ENDING_SCRIPTS:
            return [] if self.running_scripts else self._end(FINISHED)
        if self._waits:
            if self.freeze_state.never_begun:
                return self._end(NEVER_BEGUN)
            return self._freeze_where_nobody_lives()
        if self.state.stage is Stage.FREEZING:
            return self._decide_when_frozen()
        orders = self.saving.on_deaths(ranks)
        if survivors and self.regrouping.is_pending and not self._save_ends:
            orders += self.regrouping.on_death(min(survivors))
        return self.go_on(orders)

    def on_agent_lost(self, node: int) -> Orders:
        """Act on the loss of the agent of `node`; the deaths of its ranks were reported before."""
        orders = self.regrouping.on_agent_lost(node) if self.regrouping.is_pending else []
        in_save = self.state.stage in STAGES
        return self.go_on(orders + (self.saving.on_agent_lost(node) if in_save else []))

    def on_spare_lost(self, node: int) -> Orders:
        """Act on the loss of a spare node, in the place of `node`, before its agent has come."""
        return self.go_on(self.regrouping.on_spare_lost(node) if self.regrouping.is_pending else [])

    def on_spare_node(self, node: int) -> Orders:
        """Act on the arrival of the agent of a spare node in the place of `node`."""
        return self.go_on(self.regrouping.on_spare_node(node) if self.regrouping.is_pending else [])

    def handle(self, message: ToController, time_now: float) -> Orders:
        """Pass `message` to the part for its kind; return the orders that follow.

        Messages of other incidents are ignored, and answers of agents that were not asked
        (`PublishTarget.is_from_asked_agent`).
        """
        number, saving, regrouping = self.number, self.saving, self.regrouping
        match message:
            case Progress(node=node):
                saving.on_progress(node, time_now)
            case Starting(rank=rank) if rank in regrouping.newcomers.by_rank:
                regrouping.on_progress(rank)
        if getattr(message, "incident", -1) != number:
            return []
        match message:
            case Prepared() | Published() | PublishFailed():
                if self.state.target.is_from_asked_agent(message):
                    return self._on_folder_answer(message)
            case Written():
                return self.go_on(saving.on_written(message, time_now))
            case WriteFailed():
                return self.go_on(saving.on_write_failed(message))
            case Joined() if regrouping.is_pending:
                return self.go_on(regrouping.on_joined(message))
            case RegroupFailed() if regrouping.is_pending:
                return self.go_on(regrouping.on_regroup_failed(message))
            case PlacesFilled() if regrouping.is_pending:
                return self.go_on(regrouping.on_places_filled(message))
            case Present(rank=rank):
                regrouping.presence.answer(rank)
            case Renamed(rank=rank, reason=reason):
                return self.go_on(saving.on_renamed(rank, reason))
        return []

    def _on_folder_answer(self, answer: Prepared | Published | PublishFailed) -> Orders:
        match answer:
            case Prepared(folder=folder, reason=reason, number=number):
                return self.go_on(self.saving.on_prepared(folder, reason, number))
            case Published(step=step):
                return self._on_published(step)
            case PublishFailed(reason=reason, number=number):
                return self._on_publish_failed(reason, number)

    def _on_published(self, step: int) -> Orders:
        """Note that `step` has its name on disk."""
        if self.state.stage is Stage.FINDING:
            return self._end(self._search.found(step))
        orders = self.saving.on_published(step)
        if self.saving.outcome is not None and self.saving.outcome.kind == "saved":
            self.regrouping.unsaved = ""
        return self.go_on(orders)

    def _on_publish_failed(self, reason: str, number: int) -> Orders:
        """Ask another agent, or go on without the save; `number` is the number of the order."""
        if number != self.state.target.number:
            return []
        if self.state.stage is Stage.FINDING:
            self._search.found_nothing()
        return self.go_on(self.saving.on_publish_failed(reason))

    def on_newcomer(self, message: FromNewcomer) -> Orders:
        """Take a message of the new process of a rank, or about its end."""
        return self.go_on(self.regrouping.on_newcomer(message)) if self.regrouping.is_pending else []

    def on_status(self, rank: int) -> Orders:
        """Take the exit status of a failed process, by which a repeated fault is recognised."""
        self.regrouping.newcomers.has_ended(rank)
        if self.regrouping.is_pending:
            self.regrouping.require_possible()
        return self.go_on([])

    def on_told_to_end(self) -> Orders:
        """Hurry, because a rank or an agent was told to end."""
        self.freeze_state.hurry(self.state.now)
        if self.state.stage is Stage.ENDING_SCRIPTS:
            return self._end(FINISHED)
        return self.go_on(self.regrouping.cancel(self._failures.told_to_end))

    def on_tick(self, time_now: float) -> Orders:
        """Act on the limits of time that are over at `time_now`, in seconds."""
        if self.state.outcome is not None:
            return []
        if self.freeze_state.waits:
            return self._go_on_without_layouts(time_now) if self.freeze_state.is_late(time_now) else []
        if self.state.stage is Stage.FINDING:
            return self._look_again(time_now)
        if self.state.stage is Stage.ENDING_SCRIPTS:
            return [] if self.running_scripts and time_now < self.state.deadline else self._end(FINISHED)
        if self.state.stage is Stage.REGROUPING:
            return self.go_on(self.regrouping.on_tick(time_now))
        if time_now >= self.state.deadline - self._search.patience_s:
            return self.go_on(self.saving.run_out_of_time())
        if self.state.stage is Stage.FREEZING:
            return self._go_on_without_the_silent(time_now)
        return self.go_on(self.saving.on_tick(time_now))

    def _decide_when_frozen(self) -> Orders:
        is_frozen = self.state.stage is Stage.FREEZING and self.freeze_state.is_over
        return self._save() if is_frozen else []

    def _go_on_without_the_silent(self, time_now: float) -> Orders:
        """Give up ranks that take too long; where time is short, only dispensable ranks."""
        hurries = self.freeze_state.hurries(time_now)
        if not self.freeze_state.is_over_time(time_now) and (not hurries or self._needs_the_silent):
            return []
        self.freeze_state.leave_the_silent()
        return self._decide_when_frozen()

    def _await_the_silent_again(self) -> bool:
        """Wait again for ranks that were dispensable, and are not after a death; return True if so."""
        state = self.state
        silent = [rank for rank in state.silent if rank in state.given_up]
        may_be_held = silent and state.writing.may_be_held({*state.nodes, *silent})
        if not may_be_held or self.freeze_state.is_over_time(state.now):
            return False
        state.nodes |= {rank: state.membership.node_of[rank] for rank in silent}
        state.silent.clear()
        self._needs_by = (-1, -1, -1)
        state.move(Stage.FREEZING)
        return True

    @property
    def _needs_the_silent(self) -> bool:
        """Return True if only ranks without an answer hold state that is needed for a save."""
        # Called at each tick; with 100,000 ranks the answer takes as long as a tick.
        answer_counts = len(self.state.boards), len(self.state.nodes), len(self.state.membership.layouts)
        if answer_counts != self._needs_by:
            decision = choose(self.state, self.freeze_state)
            is_unheld = not isinstance(decision, Plan) and decision.unheld
            self._needs, self._needs_by = (
                is_unheld and self.state.writing.may_be_held(self.state.nodes),
                answer_counts,
            )
        return self._needs

    def _go_on_without_layouts(self, time_now: float) -> Orders:
        """Ask the known ranks to freeze: they know whether a step has finished."""
        if self.freeze_state.never_begun:
            return self._end(NEVER_BEGUN)
        if not self.state.membership.layouts:
            return [] if self._awaited else self._end(lost_layouts(self.freeze_state))
        self.freeze_state.hurry(time_now)
        return self._freeze()

    def _save(self) -> Orders:
        """Begin to save the newest possible step, and to replace failed ranks if possible."""
        decision = choose(self.state, self.freeze_state)
        if decision == FINISHED and self.running_scripts and not self._has_other_cause:
            self.state.move(Stage.ENDING_SCRIPTS)
            self.state.prolong()
            return [self.state.order(rank, EndScript(self.number)) for rank in self.running_scripts]
        if not isinstance(decision, Plan):
            self.saving.outcome = decision
            return self.go_on([])
        decision, orders = self.regrouping.start_beside_save(decision)
        return self.go_on(orders + self.saving.begin(decision))

    @property
    def _save_ends(self) -> bool:
        return self.state.stage not in (Stage.REGROUPING, Stage.FINDING) and self.saving.outcome is not None

    def go_on(self, orders: Orders) -> Orders:
        """Return `orders`, and the orders that follow from the end of the save, or of the online recovery."""
        if self.state.outcome is not None:
            return orders
        outcome = self.saving.outcome
        if self._save_ends:
            assert outcome is not None
            if outcome.unheld and self._await_the_silent_again():
                self.saving.outcome = None
                return orders
            if outcome.kind == "lost" and outcome.unheld:
                orders = orders + self.regrouping.start_from_copies()
            elif outcome.kind in ("saved", "lost") and self.regrouping.is_pending:
                unsaved = outcome.reason if outcome.kind == "lost" else ""
                orders = orders + self.regrouping.start_joining(unsaved)
            if not self.regrouping.has_begun:
                return orders + self._end(outcome)
        if self.state.stage is Stage.REGROUPING:
            if self.regrouping.is_complete:
                self.state.end(IncidentOutcome("recovered", self.step, ""))
            elif not self.regrouping.is_pending:
                assert outcome is not None
                return orders + self._end(outcome)
        return orders

    def _end(self, outcome: IncidentOutcome) -> Orders:
        if outcome.kind != "saved" and outcome not in (NEVER_BEGUN, FINISHED) and self._search.may_find:
            self.state.move(Stage.FINDING)
            # After an online recovery the time of the incident may be over.
            self.state.deadline = max(self.state.deadline, self.state.now + self._search.patience_s)
            self._search.otherwise = outcome
            self.state.target.number += 1
            return [self._search.order()]
        self.state.end(outcome)
        return []

    def _look_again(self, time_now: float) -> Orders:
        if self._search.is_over(time_now, self.state.deadline):
            assert self._search.otherwise is not None
            self.state.end(self._search.otherwise)
            return []
        return [self._search.order()] if self._search.is_due() else []
