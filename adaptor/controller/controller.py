"""The controller of a job: opens an incident at the first failure, drives the incident, gives the verdict.

The controller has no clock and no socket: messages and the time (monotonic seconds) come in as arguments,
orders go out as return values. The agents can repeat all that the controller knows, so the controller of a
later term takes over from a lost one by listening (`succeed`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Set

import msgspec

from adaptor.controller.failover import AwaitedNodes
from adaptor.controller.failures import Failures
from adaptor.controller.feasibility import Recoveries
from adaptor.controller.hang_detector import StalledNodes
from adaptor.controller.incident import Incident
from adaptor.controller.incident_state import Order, Orders, Stage
from adaptor.controller.membership import Membership
from adaptor.controller.newcomers import FromNewcomer
from adaptor.controller.plan import NoPlan, plan
from adaptor.controller.verdict import (
    Recurrence,
    end_all,
    given_up,
    go_on,
    open_words,
    recovered_of,
    refused,
    shown_rank,
    verdict_of,
)
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    AgentTerminationRequested,
    BoardRecord,
    Corruption,
    Died,
    Dying,
    Endpoint,
    EndRank,
    Exit,
    Frozen,
    Hello,
    Layout,
    NodeResumed,
    NodeStalled,
    NodesWaiting,
    Phase,
    PlacesFilled,
    Raised,
    Refused,
    ReplayComplete,
    StandbyState,
    TerminationRequested,
    ToController,
    Unprotected,
    Verdict,
)

# More than a generation of workers can have: each online recovery is an incident.
_ONLINE_INCIDENTS = 10_000


class Controller:
    """Decides for one generation of workers (from one start of all workers to the next).

    Args:
        timeout_s: the time limit of an incident without progress (TTP_OT).
        store: host, port and secret of the store over which dump groups are formed.
        recurrence: the faults of earlier generations.
        online_s: the time limit for the replacement of failed ranks (TTP_ONLINE); 0: all ranks are started
            again.
        term: 0 for the first controller, larger for each successor. No two controllers of a generation have
            the same term.
        home: the node of the controller; None: the node with the number of the term.
    """

    def __init__(
        self,
        world_size: int,
        timeout_s: float,
        store: tuple[str, int, bytes],
        number: int = 1,
        term: int = 0,
        recurrence: Recurrence | None = None,
        online_s: float = 0.0,
        home: int | None = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._store = store
        # So messages of an incident of an earlier term are recognised by the number.
        self._number = number + term * (_ONLINE_INCIDENTS if online_s else 1)
        self.term = term
        self.home = term if home is None else home
        self._recurrence = recurrence or Recurrence()
        self._awaited_nodes = AwaitedNodes()
        self.membership = Membership(world_size)
        self._failures = Failures()
        self._recoveries = Recoveries(online_s)
        self._stalled = StalledNodes()
        self.incident: Incident | None = None
        self.verdict: Verdict | None = None
        self._rendezvous_store: Endpoint | None = None
        # The store of a spare node that has taken the place of node 0 in this generation; None: none has, or
        # all agents had come there before this controller began.
        self.store_of_node_0: Endpoint | None = None
        self._is_store_known = False  # to all agents

    def succeed(
        self,
        standby_state: Iterable[StandbyState],
        nodes: Iterable[int],
        time_now: float,
        rendezvous_store: Endpoint | None = None,
    ) -> None:
        """Take the place of a lost controller; the loss of its node is reported afterwards as ever.

        Args:
            nodes: the nodes that still have to repeat their reports, the node of this controller included.
            rendezvous_store: takes the place of the store that was lost with node 0; None: no store does.
        """
        self._rendezvous_store = rendezvous_store
        for message in standby_state:
            if isinstance(message, Layout):
                self.membership.layouts[message.rank] = message
            else:
                self.membership.enter(message)
        self._awaited_nodes.begin(nodes, self.term, time_now)

    def handle(self, message: ToController, time_now: float) -> Orders:
        """Handle one message of an agent, or of a worker by way of its agent."""
        if self.incident is not None:
            self.incident.state.now = time_now
        if type(message) is Frozen:  # first: every rank sends one in each incident
            return self._on_frozen(message)
        incident = self.incident if self.verdict is None else None
        if incident is not None and isinstance(message, FromNewcomer):
            newcomers = incident.regrouping.newcomers
            if newcomers.speak_for(message.rank):
                return self._route(incident.on_newcomer(message))
        match message:
            case AgentHello(node=node):
                takes_place = node in self.membership.expected and self.verdict is None
                if message.store is not None:
                    self.store_of_node_0, self._is_store_known = message.store, False
                if takes_place:
                    self.membership.regain(message)
                elif node in self.membership.lost:
                    self.membership.late.add(node)
                else:
                    self.membership.agents.add(node)
                    self.membership.enter(message)
                if self.verdict is not None:
                    return [(node, self.verdict)]
                if takes_place and self.incident is not None:
                    return self._route(self.incident.on_spare_node(node))
            case Hello(rank=rank, pid=pid):
                if self.term and self.membership.pids.get(rank, pid) != pid:
                    self.membership.replace(rank, pid)  # the lost controller had ordered the replacement
                self.membership.connected.add(rank)
                self.membership.pids[rank] = pid
                node = self.membership.node_of[rank]
                if self.verdict is not None:
                    blamed = rank == shown_rank(self.verdict, self._failures)
                    return [(node, Addressed(rank, Exit(self.verdict.incident, blamed)))]
                if self.incident is not None and self.membership.lives(rank):
                    return self._route(self.incident.on_hello(rank, node))
            case Layout(rank=rank):
                if rejection_reason := self.membership.add(message):
                    return self._refuse(rank, rejection_reason)
                return self._route(self.incident.on_layout()) if self.incident is not None else []
            case Refused(rank=rank, reason=reason):
                return self._refuse(rank, reason)
            case Unprotected(rank=rank, why=why):
                self.membership.unprotected[rank] = why
            case Raised(rank=rank):
                self._failures.raised.setdefault(rank, message)
                self.membership.ends({rank})
                return self._fault(time_now, by_exception=True)
            case Corruption():
                return self._on_corruption(message, time_now)
            case TerminationRequested(
                rank=rank, signal=name
            ):  # the rank lives on, and may begin to train meanwhile
                return self._on_asked(rank, name, f"rank {rank}", time_now)
            case AgentTerminationRequested(node=node, signal=name, error=error):
                caller = "ttprun" if len(self.membership.agents) == 1 else f"ttprun on node {node}"
                self._failures.leaving.add(node)
                return self._on_asked(-1, name, caller, time_now, error, node)
            case NodesWaiting(node=0, count=count):  # only node 0: restarts with more nodes are not counted
                return self._on_nodes_waiting(count, time_now)
            case NodeStalled():
                return self._look_for_a_hang(time_now) if self._stalled.take(message) else []
            case NodeResumed(node=node):
                self._stalled.resume(node)
            case Dying(rank=rank, board=board):
                self.membership.boards[rank] = board
                return self._on_dying(rank, time_now)
            case Died(rank=rank, status=status, board=board, why=why):
                self.membership.boards[rank] = board
                self._failures.explain(rank, why)
                if board.phase == Phase.ENDED and (status or not self._scripts_end):
                    self._failures.ended_scripts.add(rank)
                orders = self._on_deaths({rank: status}, time_now)
                return orders + (self._route(self.incident.on_status(rank)) if self.incident else [])
            case ReplayComplete():
                return self._on_replay_complete(message, time_now)
            case AgentLost(node=node):
                return self._on_agent_lost(node, time_now)
            case PlacesFilled(node=node, owners=owners):
                if node != self.home:  # spare nodes wait at the node of this controller alone
                    return []
                self.membership.expect(owners)
                return self._on_incident_message(message, time_now)
            case _:
                return self._on_incident_message(message, time_now)
        return []

    @property
    def _scripts_end(self) -> bool:
        """Return True while an incident is open in which ranks end their scripts as they should."""
        return self.incident is not None and self.incident.state.stage is Stage.ENDING_SCRIPTS

    def open_words(self) -> str:
        """Return the progress of the open incident in words; "" without an incident or without news."""
        if self.incident is None or self.verdict is not None:
            return ""
        return open_words(self.incident, self._failures)

    def tick(self, time_now: float) -> Orders:
        """Act on the limits of time that are over at `time_now`."""
        incident = self.incident
        if incident is None:
            return []
        incident.state.now = time_now
        if (
            incident.state.outcome is not None and time_now >= incident.state.deadline
        ):  # only the exit statuses are missing
            return self._on_deaths(dict.fromkeys(self.membership.dying, -signal.SIGKILL), time_now)
        if overdue := self._awaited_nodes.overdue(time_now):
            # An agent that has connected, but not repeated its reports in time, still gets the verdict:
            # nothing else ends its job.
            self.membership.late |= self.membership.agents & set(overdue)
            return [order for node in overdue for order in self._on_agent_lost(node, time_now)]
        return self._route(incident.on_tick(time_now))

    def drill(self, rank: int, newest: int) -> Order | str:
        """Return the order that ends `rank` as a fault would, or why the drill would lose steps.

        Args:
            newest: the newest finished step.
        """
        members = self.membership
        if self.incident is not None or self.verdict is not None:
            return "an incident is open: try again when the job trains"
        if len(members.layouts) < members.world_size:
            return next(iter(members.unprotected.values()), "not all ranks train yet")
        if rank not in members.node_of:
            return f"the job has no rank {rank}: its ranks are 0 to {members.world_size - 1}"
        if newest <= self._recoveries.step:
            return "no step has finished since the start or the last recovery: try again after the next step"
        others = {
            other: BoardRecord(other, phase=Phase.RUNNING, oldest=newest, finished=newest)
            for other in members.alive
            if other != rank
        }
        if isinstance(without := plan(members.groups, others, only=newest), NoPlan):
            return without.reason
        self._failures.drilled = rank
        return members.node_of[rank], EndRank(rank)

    def _on_corruption(self, message: Corruption, time_now: float) -> Orders:
        """Open an incident at the first report; all ranks report the same."""
        ranks = message.named or message.suspects
        is_known = bool(ranks) and set(ranks) <= self.membership.node_of.keys()
        if not is_known or self._failures.corruption is not None or self.verdict is not None:
            return []
        self._failures.corruption = message
        if len(self.membership.agents) > 1:
            self._failures.nodes = {rank: self.membership.node_of[rank] for rank in ranks}
        if self.incident is not None:
            return self._route(self.incident.on_corruption())
        return self._fault(time_now, by_exception=False)

    def _on_asked(
        self, rank: int, name: str, caller: str, time_now: float, error: str = "", node: int = -1
    ) -> Orders:
        if self.incident is None and self.verdict is None:
            self._failures.ask(rank, caller, name, error, node)
        self._failures.told_to_end = (
            f"{caller} has failed: {error}" if error else f"{caller} was told to end by {name}"
        )
        if self.incident is not None:
            return self._route(self.incident.on_told_to_end())
        return self._fault(time_now, by_exception=False)  # nothing else explains it

    def _on_nodes_waiting(self, count: int, time_now: float) -> Orders:
        """Have the newest step saved, so that all workers start again on more nodes."""
        is_quiet = self.incident is None and self.verdict is None
        if not (count and is_quiet and self.membership.fits(len(self.membership.agents) + count)):
            return []
        self._failures.join(count)
        return self._fault(time_now, by_exception=False)

    def _look_for_a_hang(self, time_now: float) -> Orders:
        """Open an incident if every node stands still: a rank that hangs makes all others wait."""
        if self.incident is not None or self.verdict is not None:
            return []
        self._failures.hang_s = self._stalled.hang_s(self.membership.agents)
        return self._fault(time_now, by_exception=False) if self._failures.hang_s else []

    def _on_dying(self, rank: int, time_now: float) -> Orders:
        if not self.membership.begin_to_die(rank):
            return []
        if self.verdict is None and not self._is_ended_by_order(rank):
            self._failures.unannounced.add(rank)
            self._failures.notice([rank])
        return self._record_deaths({rank}, time_now)

    def _on_deaths(self, statuses: dict[int, int], time_now: float) -> Orders:
        new, sudden = self.membership.record_deaths(statuses)
        by_themselves = [rank for rank in statuses if rank in new and not self._is_ended_by_order(rank)]
        for rank in by_themselves:
            self._failures.end(rank, statuses[rank])
        self._failures.notice(by_themselves)
        if self.incident is None and not any(statuses[rank] for rank in new):
            return []
        return self._record_deaths(sudden, time_now)

    def _is_ended_by_order(self, rank: int) -> bool:
        """Return True if the process of `rank` is ended for its replacement, which is no failure."""
        return self.incident is not None and rank in self.incident.regrouping.newcomers.ended_ranks

    def _record_deaths(self, ranks: Set[int], time_now: float) -> Orders:
        if self.incident is None:
            return self._fault(time_now, by_exception=False)
        return self._route(self.incident.on_deaths(ranks) if ranks else [])

    def _on_agent_lost(self, node: int, time_now: float) -> Orders:
        if node in self.membership.lost:
            had_spare = self.membership.expected.pop(node, None) is not None
            return self._route(self.incident.on_spare_lost(node)) if had_spare and self.incident else []
        ranks = self.membership.lose(node)
        self._awaited_nodes.lose(node)
        self._failures.lose(node, ranks, self.membership.hosts.get(node, ""))
        orders = self._on_deaths(dict.fromkeys(ranks, -signal.SIGKILL), time_now)
        # The workers of the node had ended before; the others may have hung by then.
        if self.incident is None:
            return self._look_for_a_hang(time_now)
        orders += self._route(self.incident.on_agent_lost(node))
        orders += self._route(self.incident.on_replay_complete())
        return orders

    def _on_replay_complete(self, end: ReplayComplete, time_now: float) -> Orders:
        verdict = end.verdict
        if not self._awaited_nodes.has_told(end.node, time_now):
            return []
        if end.has_acted:
            self._failures.was_interrupted = True
        if verdict is not None and self.verdict is None:
            lost = tuple(sorted(self.membership.lost)) or (0,)
            self.verdict = msgspec.structs.replace(verdict, leaves=lost, lost=lost)
            return self._broadcast_verdict(verdict.incident)
        return self._route(self.incident.on_replay_complete()) if self.incident is not None else []

    def _fault(self, time_now: float, *, by_exception: bool) -> Orders:
        if self.incident is not None or self.verdict is not None:
            return []
        self.incident = Incident(
            self._number,
            self.membership,
            self._failures,
            opened_at=time_now,
            timeout_s=self._timeout_s,
            store=self._store,
            awaited=self._awaited_nodes.awaited,
            term=self.term,
            home=self.home,
            recoveries=self._recoveries,
        )
        self._number += 1
        return self._route(self.incident.open(by_exception))

    def _on_frozen(self, answer: Frozen) -> Orders:
        incident = self.incident
        if incident is None or answer.incident != incident.number:
            return []
        if answer.standing is not None:
            self._failures.standing[answer.rank] = answer.standing
        return self._route(incident.on_frozen(answer.rank, answer.board))

    def _on_incident_message(self, message: ToController, time_now: float) -> Orders:
        incident = self.incident
        return self._route(incident.handle(message, time_now)) if incident is not None else []

    def _route(self, orders: Orders) -> Orders:
        """Return the orders of the incident, and the orders that follow from its end."""
        assert self.incident is not None
        outcome = self.incident.state.outcome
        if self.verdict is not None:
            return []
        if outcome is None:
            return orders
        if outcome.kind == "recovered":
            return orders + self._proceed(self.incident)
        return orders if self.membership.dying else orders + self._conclude()

    def _proceed(self, incident: Incident) -> Orders:
        """End the incident, because all ranks have joined; the next fault opens another incident."""
        recovered = recovered_of(incident, self._failures, self.membership)
        recovered = msgspec.structs.replace(recovered, store=self.store_of_node_0)
        self._is_store_known = True
        self._recoveries.note(
            recovered.fault.key,
            recovered.step,
            incident.state.target.number + 1,
            self._failures.out_of_memory,
        )
        for rank, newcomer in incident.regrouping.newcomers.by_rank.items():
            self.membership.replace(rank, newcomer.pid)
        self.incident, self._failures = None, Failures()
        self._stalled.clear()
        return go_on(recovered, self.membership)

    def _conclude(self) -> Orders:
        assert self.incident is not None
        verdict = verdict_of(self.incident, self._failures, self.membership)
        store = None if self._is_store_known else self.store_of_node_0
        if 0 in verdict.lost:
            store = self._rendezvous_store
        verdict = msgspec.structs.replace(verdict, store=store)
        self.verdict = self._recurrence.judge(verdict)
        return self._broadcast_verdict(self.incident.number)

    def give_up(self, reason: str) -> Orders:
        """End the job without a decision, because the controller itself has failed."""
        if self.verdict is not None:
            return []
        number = self.incident.number if self.incident is not None else 0
        self.verdict = given_up(number, reason)
        return self._broadcast_verdict(number)

    def _refuse(self, rank: int, reason: str) -> Orders:
        if self.verdict is not None:
            return []
        self.verdict = refused(rank, reason)
        return self._broadcast_verdict(0)

    def _broadcast_verdict(self, number: int) -> Orders:
        assert self.verdict is not None
        shown = shown_rank(self.verdict, self._failures)
        return end_all(self.verdict, number, shown, self.membership)
