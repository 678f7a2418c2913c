"""Drives the online recovery of an incident until all ranks have joined, or it is given up; pure.

The recovery begins beside the save of the step (`Saving`): the new processes start during the save. Only when
the step is on disk, and every new process has said hello, are survivors told to leave their loops
(`Regroup`). So a later failure ends in another attempt, or in a restart from the step, which needs nothing of
the survivors any more. If the step could not be saved, all ranks join all the same, and the line says so. If
no step can be saved, because a shard has no live holder, all ranks go back to the newest step of which each
rank has a copy in host memory, new processes included.

Invariant: no process that gives a step is ended before the save is over. With local copies, a rank that is to
be replaced may alone hold the step before, which is saved if the holders of the newest step die.
"""

from __future__ import annotations

from adaptor.controller.feasibility import CannotRegroupError, Feasibility
from adaptor.controller.freeze import FreezeState
from adaptor.controller.incident_state import IncidentState, Orders, Stage
from adaptor.controller.newcomers import FromNewcomer, Newcomers, PresenceCheck
from adaptor.controller.plan import Plan
from adaptor.protocol.messages import (
    FillPlaces,
    Joined,
    PlacesFilled,
    PresenceProbe,
    Regroup,
    RegroupFailed,
    Replace,
    Replacement,
)

# Each attempt but the first follows a further fault. More faults within one recovery have one cause, which a
# restart may remove.
MOST_ATTEMPTS = 6
# A rank that cannot join may only be the first to notice the loss of another node: its connections end at
# once, and a silent node counts as lost after 2 to 3 s.
ECHO_S = 3.5
# A recovery is given up after this multiple of the limit (TTP_ONLINE) even if there is progress: a new
# process may use CPU time and never join.
MOST_LIMITS = 10


class Regrouping:
    """The online recovery of one incident.

    Attributes:
        is_pending: the recovery was begun, and has not failed
        why_not: why the recovery was not tried, or has failed; "" where the user need not know
        unsaved: why the step is not on disk; "" if it is
    """

    def __init__(self, state: IncidentState, freeze_state: FreezeState, feasibility: Feasibility) -> None:
        self._state = state
        self._freeze_state = freeze_state
        self._writing = state.writing
        self._feasibility = feasibility
        self.newcomers = Newcomers(state.membership)
        self.is_pending = False
        self.why_not = ""
        self.unsaved = ""
        self._planned: tuple[Replacement, ...] = ()  # of this attempt: all replaced ranks, kept processes too
        self._attempts = 0
        self.begun_at = 0.0
        self._moved_at = 0.0  # the newest progress of any rank
        self._still_rounds = 0  # rounds of the presence check since then
        self._joined: dict[int, str] = {}  # the digest of each rank that has joined in this attempt
        self._is_told = False  # survivors have their orders, in this attempt
        # A rank that cannot join, the reason, and the time until which an unreported loss may explain it.
        self._unexplained: tuple[int, str, float] | None = None
        self._excused: set[int] = set()  # survivors that could not join once without a known cause
        self._has_stood_still = False  # once: all ranks answered, none made progress, and no rank stood out
        self.presence = PresenceCheck(state.now, self.timeout_s)

    @property
    def timeout_s(self) -> float:
        """Return the limit of the time without progress, in seconds, once the step is saved."""
        return min(self._feasibility.recoveries.seconds, self._state.timeout_s / 2)

    @property
    def has_begun(self) -> bool:
        """Return True if survivors take part: the step is saved, or could not be."""
        return self._state.stage is Stage.REGROUPING

    @property
    def is_complete(self) -> bool:
        """Return whether all ranks of the job have joined."""
        return len(self._joined) == self._state.membership.world_size

    # beside the save

    def start_beside_save(self, decision: Plan) -> tuple[Plan, Orders]:
        """Begin to replace failed ranks if possible; return the plan for the step to save first, and orders.

        With local copies that step may be the step before the newest.
        """
        if not self._feasibility.recoveries.seconds:  # online recovery is off
            return decision, []
        step = self._feasibility.common_step(decision.step)
        try:
            common = self._writing.decide(self._state.boards, step=step)
            common = common if isinstance(common, Plan) else decision
            orders = self._replace(common.step, cold=False)
        except CannotRegroupError as error:
            self.why_not = str(error)
            return decision, []
        self.is_pending = True
        return common, orders

    def start_from_copies(self) -> Orders:
        """Let all ranks go back to the newest step that every rank has copied to host memory, if possible."""
        self.is_pending = False
        step, feasibility = self._feasibility.copied_step, self._feasibility
        if not feasibility.recoveries.seconds or step <= self._writing.origin or not self._state.nodes:
            return []
        feasibility.from_copies = True
        try:
            self._require_plan(step)
        except CannotRegroupError as error:
            self.why_not = str(error)
            return []
        self.is_pending = True
        self._writing.step = step
        self._state.move(Stage.REGROUPING)
        self.begun_at = self._state.now
        return self._replace(step, cold=False) + self._tell_when_ready()

    @property
    def from_copies(self) -> bool:
        """Return whether all ranks go back to copies in host memory."""
        return self._feasibility.from_copies

    def _replace(self, step: int, *, cold: bool) -> Orders:
        """Begin an attempt to come to `step`, without spares if `cold`. Raises CannotRegroupError."""
        self._planned = self._require_plan(step)
        self._attempts += 1
        if self.has_begun:
            self._begin_attempt()
        return self._start_newcomers(step, cold=cold)

    def _start_newcomers(self, step: int, *, cold: bool) -> Orders:
        """Take out the ranks that cannot come to `step`, and start new processes for all missing ranks.

        While the step is being saved, ranks that give another step are kept. `cold`: as in `_replace`.
        """
        kept = set() if self.has_begun else self._feasibility.giving()
        for rank in self._feasibility.ranks_to_replace(step) - kept:
            self._state.leave(rank)
        replaced = [replacement for replacement in self._planned if replacement.rank not in self._state.nodes]
        started = self.newcomers.begin_attempt(replaced, self._writing.attempt)
        unplaced = self._feasibility.places.ask(self.newcomers.unplaced)
        state, attempt, node_of = self._state, self._writing.attempt, self._state.membership.node_of
        # The agent of this controller gives the places of lost nodes to spare nodes, if any wait.
        fill: Orders = [(state.home, FillPlaces(state.number, unplaced))] if unplaced else []
        return fill + [(node_of[rank], Replace(state.number, attempt, rank, cold)) for rank in started]

    def _retry(self, reason: str, *, cold: bool) -> Orders:
        """Begin another attempt, if one may help, else give the recovery up; `cold`: as in `_replace`.

        After the last attempt, too, the reason says why another attempt could not help.
        """
        try:
            if self._attempts < MOST_ATTEMPTS and not self.newcomers.failed_twice:
                orders = self._replace(self._writing.step, cold=cold)
                return orders + self._tell_when_ready()
            reason = self.newcomers.failed_twice or reason
            self._require_plan(self._writing.step)
        except CannotRegroupError as error:
            reason = f"{reason}; {error}"
        return self.cancel(reason)

    def _require_plan(self, step: int) -> tuple[Replacement, ...]:
        """Return the replacements to come to `step`. Raises CannotRegroupError with the reason why not."""
        self._feasibility.require_possible(step)
        return self._feasibility.plan(step)

    def cancel(self, reason: str) -> Orders:
        """Give the recovery up, and return no orders: `Incident` sees that `is_pending` is False."""
        if self.is_pending:
            self.is_pending, self.why_not = False, reason
        return []

    def require_possible(self) -> None:
        """Give the recovery up if it has become impossible."""
        try:
            self._feasibility.require_possible(self._writing.step)
        except CannotRegroupError as error:
            self.cancel(str(error))

    def on_death(self, rank: int) -> Orders:
        """Act on the death of a survivor, or of a rank that was kept until the save is over."""
        if (
            any(replacement.rank == rank for replacement in self._planned)
            and rank not in self.newcomers.by_rank
        ):
            self.require_possible()  # its node may be lost
            return self._start_newcomers(self._writing.step, cold=False) if self.is_pending else []
        return self._retry(f"rank {rank} has died, too", cold=False)

    def on_agent_lost(self, node: int) -> Orders:
        """Act on the loss of the agent of `node`; the deaths of its ranks were reported before."""
        if self.newcomers.lose(node):
            self._feasibility.places.lose(node)
            return self._retry(f"node {node} is lost", cold=False)
        self.require_possible()
        return []

    def on_spare_lost(self, node: int) -> Orders:
        """Retry, because the spare node in the place of `node` was lost before its agent came."""
        self._feasibility.places.lose(node)
        return self._retry(f"the spare node in the place of node {node} is lost", cold=False)

    def on_places_filled(self, answer: PlacesFilled) -> Orders:
        """Cancel the recovery if node 0 has no spare nodes for the lost places."""
        reason = self._feasibility.places.answer(answer)
        return self.cancel(reason) if reason else []

    def on_spare_node(self, node: int) -> Orders:
        """Note that the agent of a spare node has come for `node`, and starts the new processes."""
        self._feasibility.places.come(node)
        self.newcomers.place(node)
        self._note_progress()
        return []

    @property
    def spare_nodes(self) -> list[int]:
        """Return the places that spare nodes have taken."""
        return sorted(self._feasibility.places.taken)

    def on_newcomer(self, message: FromNewcomer) -> Orders:
        """Act on a message of the new process of a rank, or about its end."""
        self.on_progress(message.rank)
        reason = self.newcomers.failure_in(message, self._writing.attempt)
        if not reason:
            return self._tell_when_ready()
        reason = f"the new process of rank {message.rank} {reason}"
        if isinstance(message, RegroupFailed) and message.may_be_echo:
            return self._await_loss(message.rank, reason)
        return self._retry_newcomers([message.rank], reason)

    def on_progress(self, rank: int) -> None:
        """Note that a rank makes progress: it has sent a message, or its new process uses CPU time."""
        self.presence.answer(rank)
        self._note_progress()

    def _note_progress(self) -> None:
        self._moved_at, self._still_rounds = self._state.now, 0

    # joining

    def start_joining(self, unsaved: str) -> Orders:
        """Let all ranks come to the step; `unsaved`: why it could not be saved, "" if it is saved."""
        self.unsaved = unsaved
        self._state.move(Stage.REGROUPING)
        self.begun_at = self._moved_at = self._state.now
        step, feasibility = self._writing.step, self._feasibility
        try:
            if feasibility.plan(step) != self._planned:
                return self._retry("another rank has failed meanwhile", cold=False)
        except CannotRegroupError as error:
            return self.cancel(str(error))
        self.require_possible()
        if not self.is_pending:
            return []
        self._begin_attempt()
        return self._start_newcomers(step, cold=False) + self._tell_when_ready()

    def _begin_attempt(self) -> None:
        self._joined = {}
        self._is_told = False
        self._unexplained = None
        self._note_progress()
        self._writing.attempt += 1
        self.presence = PresenceCheck(self._state.now, self.timeout_s)

    def _tell_when_ready(self) -> Orders:
        """Order all ranks to regroup, once all new processes have said hello, and the step is saved."""
        if self._is_told or not (self.has_begun and self.newcomers.are_ready):
            return []
        self._is_told = True
        self._feasibility.recoveries.exchanges += 1
        self.newcomers.tell()
        nodes, step = self._state.nodes, self._writing.step
        self._freeze_state.let_through(nodes, step)
        self._freeze_state.take_back(nodes, step)
        host, port, secret = self._state.store
        order = Regroup(
            incident=self._state.number,
            attempt=self._writing.attempt,
            step=step,
            origin=self._writing.origin,
            replaced=self.newcomers.replaced,
            store_host=host,
            store_port=port,
            timeout_s=MOST_LIMITS * self.timeout_s,
            store_secret=secret,
            from_copies=self.from_copies,
        )
        return [self._state.order(rank, order) for rank in [*nodes, *self.newcomers.by_rank]]

    def on_joined(self, message: Joined) -> Orders:
        """Note that a rank has come to the step; a rank with another state ends the recovery."""
        self.presence.answer(message.rank)
        if not self._awaits(message):
            return []
        self.on_progress(message.rank)
        reason = ""
        if message.step != self._writing.step:
            reason = f"it came to step {message.step}, not to step {self._writing.step}"
        elif message.digest != next(iter(self._joined.values()), message.digest):
            reason = "its process groups or parameters differ from those of other ranks"
        if reason:
            return self.cancel(f"rank {message.rank}: {reason}")
        self._joined[message.rank] = message.digest
        return []

    def on_regroup_failed(self, message: RegroupFailed) -> Orders:
        """Try once more if another process may take the place of the rank; otherwise end the recovery."""
        if message.rank in self.newcomers.by_rank:
            return self.on_newcomer(message)
        if not self._awaits(message):
            return []
        reason = f"rank {message.rank}: {message.reason}"
        if message.may_be_echo:
            return self._await_loss(message.rank, reason)
        return self._retry_without(message.rank, reason) if message.is_replaceable else self.cancel(reason)

    def _retry_newcomers(self, ranks: list[int], reason: str) -> Orders:
        """Try once more after the new processes of `ranks` have failed by themselves."""
        self.newcomers.count_failures(ranks, reason)
        return self._retry(reason, cold=True)

    def _retry_without(self, rank: int, reason: str) -> Orders:
        """Try once more with a new process in the place of a survivor that cannot join."""
        self._feasibility.hanging.add(rank)
        return self._retry(reason, cold=False)

    def _await_loss(self, rank: int, reason: str) -> Orders:
        """Wait for the report of a loss that explains why `rank` cannot join."""
        if self._unexplained is None:
            self._unexplained = rank, reason, self._state.now + ECHO_S
        return []

    def _on_unexplained(self, rank: int, reason: str) -> Orders:
        """Try once more, because no loss explains why `rank` cannot join; at first it keeps its process."""
        if rank in self.newcomers.by_rank:
            return self._retry_newcomers([rank], reason)
        if rank in self._excused:
            return self._retry_without(rank, reason)
        self._excused.add(rank)
        return self._retry(reason, cold=False)

    def _awaits(self, message: Joined | RegroupFailed) -> bool:
        """Return True if `message` belongs to this attempt, and to a process that takes part."""
        if message.attempt != self._writing.attempt or not self._is_told:
            return False
        return message.rank in self._state.nodes or message.rank in self.newcomers.by_rank

    def on_tick(self, time_now: float) -> Orders:
        """Give up a recovery without progress, so that all restart; check the presence of all ranks."""
        if self._unexplained is not None and time_now >= self._unexplained[2]:
            rank, reason, _ = self._unexplained
            return self._on_unexplained(rank, reason)
        limit_s = self.timeout_s
        if time_now >= self._moved_at + limit_s:
            return self.cancel(f"no progress for {limit_s:g} s (TTP_ONLINE)")
        if time_now >= self.begun_at + MOST_LIMITS * limit_s:
            return self.cancel(f"not done after {MOST_LIMITS * limit_s:g} s")
        return self._check_presence(time_now) if self.presence.is_due(time_now) else []

    def _check_presence(self, time_now: float) -> Orders:
        """Replace ranks that do not answer, or end without them; ask all others."""
        nodes, newcomers = self._state.nodes, self.newcomers
        missing = self.presence.missing(nodes, newcomers.placed)
        survivors = [rank for rank in missing if rank in nodes]
        starting = [rank for rank in missing if rank in newcomers.by_rank]
        newcomers.fail(starting)
        if survivors:
            self._feasibility.hanging.update(survivors)
            return self._retry(f"rank {survivors[0]} does not answer any more", cold=False)
        if starting:
            return self._retry_newcomers(starting, f"the new process of rank {starting[0]} does not answer")
        if self._still_rounds >= self.presence.rounds_of_newcomers and not newcomers.unplaced:
            return self._on_standstill()
        self._still_rounds += 1
        self.presence.begin_round({*nodes, *newcomers.placed}, time_now)
        probe = PresenceProbe(self._state.number)
        return [self._state.order(rank, probe) for rank in sorted({*nodes, *newcomers.listening})]

    def _on_standstill(self) -> Orders:
        """Try once more, because all ranks answer and none makes progress.

        A new process that has not joined is replaced, although it may only wait for a survivor: it holds no
        state. A survivor whose main thread hangs says so in the next attempt (`RegroupFailed`).
        """
        waiting = [rank for rank in self.newcomers.placed if rank not in self._joined]
        if waiting:
            self.newcomers.fail(waiting)
            return self._retry_newcomers(waiting, f"the new process of rank {waiting[0]} makes no progress")
        reason = f"no progress for {self.timeout_s / 2:g} s"
        if self._has_stood_still:
            return self.cancel(reason)
        self._has_stood_still = True
        return self._retry(reason, cold=False)
