"""The controller of a job: opens an incident at the first failure, drives it, gives the verdict.

It has no clock and no socket: messages and the time (monotonic seconds) come in as arguments, orders go out
as return values. It keeps nothing that the agents could not tell it again, so the controller of a later term
takes the place of one that is lost by listening (`succeed`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Set

import msgspec

from adaptor.control.causes import Causes
from adaptor.control.hearing import hear
from adaptor.control.incident import Incident
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    ControllerToAgent,
    Died,
    Dying,
    Exit,
    Frozen,
    Hello,
    Layout,
    Leave,
    Legacy,
    Moving,
    Phase,
    Raised,
    Recalled,
    Refused,
    Standing,
    Still,
    ToController,
    Told,
    Verdict,
)
from adaptor.control.roster import Roster
from adaptor.control.stages import Directive
from adaptor.control.stillness import hang
from adaptor.control.take_over import TakeOver
from adaptor.control.verdicts import verdict_of

Orders = list[tuple[int, ControllerToAgent]]  # (node, order)

REFUSED_EXIT_CODE = 2
# A rank that has stood still for long is in no update that will end soon: it answers at once, or never. And
# who is told to end has no time to wait for one that does not answer.
ANSWER_S = 5.0


class Controller:
    """Decides for one generation of workers (from one start of all workers to the next).

    Args:
        world_size: ranks in the job.
        timeout_s: how long an incident may last without progress (TTP_OT).
        store: host and port of the store over which dump groups are formed.
        number: the number that the next incident gets.
        term: 0 for the first controller; the one that takes the place of another has a larger one. No two in
            a generation have the same.
    """

    def __init__(
        self, world_size: int, timeout_s: float, store: tuple[str, int], number: int = 1, term: int = 0
    ) -> None:
        self._timeout_s = timeout_s
        self._store = store
        self._number = number + term  # so what belongs to an incident of an earlier term is known by it
        self.term = term
        self._take_over = TakeOver()
        self.roster = Roster(world_size)
        self._causes = Causes(self.roster.dead)
        self._still: dict[int, Still] = {}  # of nodes whose workers all stand still
        self.incident: Incident | None = None
        self.verdict: Verdict | None = None

    def succeed(self, legacy: Iterable[Legacy], nodes: Iterable[int], now: float) -> None:
        """Take the place of a controller that is lost; that its node is lost is told as ever, afterwards.

        Args:
            legacy: what it had passed on.
            nodes: those that are still to say again what they know, this one's included.
        """
        for message in legacy:
            if isinstance(message, Layout):
                self.roster.layouts[message.rank] = message
            else:
                self.roster.enter(message.node, message.ranks)
        self._take_over.begin(nodes, self.term, now)

    def handle(self, message: ToController, now: float) -> Orders:
        """Take one message of an agent, or of a worker by way of its agent."""
        match message:
            case AgentHello(node=node, ranks=ranks):
                self.roster.agents.add(node)
                self.roster.enter(node, ranks)
                if self.verdict is not None:
                    return [(node, self.verdict)]
            case Hello(rank=rank):
                self.roster.connected.add(rank)
                node = self.roster.node_of[rank]
                if self.verdict is not None:
                    return [(node, Addressed(rank, Exit(self.verdict.incident)))]
                if self.incident is not None and self.roster.lives(rank):
                    return self._route(self.incident.on_joined(rank, node))
            case Layout(rank=rank):
                if objection := self.roster.add(message):
                    return self._refuse(rank, objection)
                return self._route(self.incident.on_layout()) if self.incident is not None else []
            case Refused(rank=rank, reason=reason):
                return self._refuse(rank, reason)
            case Raised(rank=rank):
                self._causes.raised.setdefault(rank, message)
                self.roster.ends({rank})
                return self._fault(now, by_death=False)
            case Told(rank=rank, signal=name):  # it lives on, and may begin to train meanwhile
                return self._on_asked(rank, name, f"rank {rank}", now)
            case Leave(node=node, signal=name):
                who = "ttprun" if len(self.roster.agents) == 1 else f"ttprun on node {node}"
                self._causes.leaving.add(node)
                return self._on_asked(-1, name, who, now)
            case Still():
                return self._on_still(message, now)
            case Moving(node=node):
                self._still.pop(node, None)
            case Dying(rank=rank, board=board):
                self.roster.boards[rank] = board
                return self._on_dying(rank, now)
            case Died(rank=rank, status=status, board=board):
                self.roster.boards[rank] = board
                if board.phase == Phase.ENDED:
                    self._causes.ended.add(rank)
                return self._on_deaths({rank: status}, now)
            case Recalled(node=node, verdict=verdict):
                return self._on_recalled(node, verdict, now)
            case AgentLost(node=node):
                return self._on_agent_lost(node, now)
            case _:
                return self._on_incident_message(message, now)
        return []

    def tick(self, now: float) -> Orders:
        """Let time pass."""
        incident = self.incident
        if incident is None:
            return []
        if (
            incident.outcome is not None and now >= incident.deadline
        ):  # all is done but to learn how they ended
            return self._on_deaths(dict.fromkeys(self.roster.dying, -signal.SIGKILL), now)
        if overdue := self._take_over.overdue(now):
            return [order for node in overdue for order in self._on_agent_lost(node, now)]
        return self._route(incident.on_tick(now))

    def _on_asked(self, rank: int, name: str, who: str, now: float) -> Orders:
        if self.incident is None and self.verdict is None:
            self._causes.ask(rank, who, name)
        return self._fault(now, by_death=True)  # nothing else explains it

    def _on_still(self, still: Still, now: float) -> Orders:
        before = self._still.get(still.node)
        self._still[still.node] = still
        if before is not None and (before.inside, before.between) == (still.inside, still.between):
            return []  # it lasts: thousands of nodes may say so, again and again, while all evaluate
        return self._look_for_a_hang(now)

    def _look_for_a_hang(self, now: float) -> Orders:
        """A rank that hangs makes all others wait: it is a hang when every node stands still."""
        agents, still = self.roster.agents, self._still
        if self.incident is not None or self.verdict is not None or not agents <= still.keys():
            return []
        if not hang(still[node] for node in agents):
            return []
        self._causes.hang_s = min(still[node].seconds for node in agents)
        return self._fault(now, by_death=True)

    def _on_dying(self, rank: int, now: float) -> Orders:
        if not self.roster.begin_to_die(rank):
            return []
        if self.verdict is None:
            self._causes.unannounced.add(rank)
        return self._bury({rank}, now)

    def _on_deaths(self, statuses: dict[int, int], now: float) -> Orders:
        new, sudden = self.roster.bury(statuses)
        if self.incident is None and not any(statuses[rank] for rank in new):
            return []
        return self._bury(sudden, now)

    def _bury(self, ranks: Set[int], now: float) -> Orders:
        if self.incident is None:
            return self._fault(now, by_death=True)
        for rank in ranks:
            self.incident.nodes.pop(rank, None)
        return self._route(self.incident.on_deaths(ranks) if ranks else [])

    def _on_agent_lost(self, node: int, now: float) -> Orders:
        self.roster.agents.discard(node)
        self._take_over.lose(node)
        ranks = self._causes.lost[node] = self.roster.left_on(node)
        self.roster.vanished.update(ranks)
        orders = self._on_deaths(dict.fromkeys(ranks, -signal.SIGKILL), now)
        if self.incident is None:  # its workers had come to their ends; the others may have hung by then
            return self._look_for_a_hang(now)
        orders += self._route(self.incident.on_agent_lost(node))
        orders += self._route(self.incident.on_recalled())
        return orders

    def _on_recalled(self, node: int, verdict: Verdict | None, now: float) -> Orders:
        if not self._take_over.has_told(node, now):
            return []
        if verdict is not None and self.verdict is None:
            self.verdict = msgspec.structs.replace(verdict, leaves=(0,), lost=True)
            return self._farewell(verdict.incident)
        return self._route(self.incident.on_recalled()) if self.incident is not None else []

    def _fault(self, now: float, *, by_death: bool) -> Orders:
        if self.incident is not None or self.verdict is not None:
            return []
        self.incident = Incident(
            self._number,
            self.roster.alive,
            self.roster.agents,
            self.roster.layouts,
            self.roster.world_size,
            now,
            self._timeout_s,
            self._store,
            self.roster.unbegun,
            self._take_over.awaited,
            self.roster.boards,
            self.term,
            stacks=self._causes.hang_s > 0,
            answer_s=ANSWER_S if self._causes.hang_s or self._causes.asked else 0.0,
        )
        self._number += 1
        return self._route(self.incident.open(by_death))

    def _on_incident_message(self, message: ToController, now: float) -> Orders:
        incident = self.incident
        if incident is None:
            return []
        match message:
            case Frozen(rank=rank, incident=incident.number, standing=Standing() as standing):
                self._causes.standing[rank] = standing
        return self._route(hear(incident, message, now))

    def _route(self, directives: list[Directive]) -> Orders:
        assert self.incident is not None
        if self.verdict is not None:
            return []
        orders: Orders = []
        for directive in directives:
            if directive.rank is not None:
                node = self.roster.node_of[directive.rank]
                orders.append((node, Addressed(directive.rank, directive.message)))  # type: ignore[arg-type]
            elif directive.node is not None:
                orders.append((directive.node, directive.message))  # type: ignore[arg-type]
        if self.incident.outcome is not None and not self.roster.dying:
            orders += self._pronounce()
        return orders

    def _pronounce(self) -> Orders:
        assert self.incident is not None
        self.verdict = verdict_of(self.incident, self._causes, self.roster)
        return self._farewell(self.incident.number)

    def give_up(self, reason: str) -> Orders:
        """End the job without a decision: what should decide has failed."""
        if self.verdict is not None:
            return []
        number = self.incident.number if self.incident is not None else 0
        self.verdict = Verdict(number, "lost", -1, f"the controller failed: {reason}", -1, 1, "")
        return self._farewell(number)

    def _refuse(self, rank: int, reason: str) -> Orders:
        if self.verdict is not None:
            return []
        self.verdict = Verdict(0, "refused", -1, reason, rank, REFUSED_EXIT_CODE, "")
        return self._farewell(0)

    def _farewell(self, number: int) -> Orders:
        assert self.verdict is not None
        # First to the agents: no worker exits whose agent does not know the verdict, whatever dies now.
        verdicts: Orders = [(node, self.verdict) for node in sorted(self.roster.agents)]
        leave = Exit(number)
        return verdicts + [
            (node, Addressed(rank, leave))
            for rank, node in self.roster.node_of.items()
            if rank not in self.roster.dead
        ]
