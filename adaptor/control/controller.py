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
from adaptor.control.incident import Directive, Incident, Outcome
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
    Prepared,
    Progress,
    Published,
    PublishFailed,
    Raised,
    Recalled,
    Refused,
    Renamed,
    Still,
    ToController,
    Told,
    Verdict,
    WriteFailed,
    Written,
)

Orders = list[tuple[int, ControllerToAgent]]  # (node, order)

REFUSED_EXIT_CODE = 2
# A rank that has stood still for long is in no update that will end soon: it answers at once, or never. And
# who is told to end has no time to wait for one that does not answer.
ANSWER_S = 5.0
# So long a new controller waits for nodes while none comes, before it decides without those that have not.
# One that lives has noticed the loss half a second later at most (`wire`), and comes at once; this leaves a
# busy machine time. Whoever is there has been told to freeze meanwhile.
ROLL_S = 2.0


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
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._store = store
        self._number = number + term  # so what belongs to an incident of an earlier term is known by it
        self.term = term
        self._awaited: set[int] = set()
        self._awaited_until = 0.0
        self._node_of: dict[int, int] = {}
        self._agents: set[int] = set()
        self._connected: set[int] = set()
        self._layouts: dict[int, Layout] = {}
        self._unbegun: set[int] = set()  # they ended before they had told their layout
        self._causes = Causes()
        self._dead = self._causes.dead
        self._dying: set[int] = set()  # their statuses are not known yet
        self._still: set[int] = set()  # nodes whose workers all stand still
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
                self._layouts[message.rank] = message
            else:
                self._node_of.update(dict.fromkeys(message.ranks, message.node))
        self._awaited.update(nodes)
        self._awaited_until = now + ROLL_S

    @property
    def everyone_is_dead(self) -> bool:
        return len(self._dead) >= self._world_size

    def handle(self, message: ToController, now: float) -> Orders:
        """Take one message of an agent, or of a worker by way of its agent."""
        match message:
            case AgentHello(node=node, ranks=ranks):
                self._agents.add(node)
                self._node_of.update(dict.fromkeys(ranks, node))
                if self.verdict is not None:
                    return [(node, self.verdict)]
            case Hello(rank=rank):
                self._connected.add(rank)
                if self.verdict is not None:
                    return [(self._node_of[rank], Addressed(rank, Exit(self.verdict.incident)))]
                if self.incident is not None and rank not in self._dead and rank not in self._dying:
                    return self._route(self.incident.on_joined(rank, self._node_of[rank]))
            case Layout(rank=rank):
                return self._on_layout(rank, message, now)
            case Refused(rank=rank, reason=reason):
                return self._refuse(rank, reason)
            case Raised(rank=rank):
                self._causes.raised.setdefault(rank, message)
                self._ends({rank})
                return self._fault(now, by_death=False)
            case Told(rank=rank, signal=name):
                self._ends({rank})
                return self._on_asked(rank, name, f"rank {rank}", -1, now)
            case Leave(node=node, signal=name):
                who = "ttprun" if len(self._agents) == 1 else f"ttprun on node {node}"
                return self._on_asked(-1, name, who, node, now)
            case Still(node=node, seconds=seconds):
                return self._on_still(node, seconds, now)
            case Moving(node=node):
                self._still.discard(node)
            case Dying(rank=rank):
                return self._on_dying(rank, now)
            case Died(rank=rank, status=status, board=board):
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
            return self._on_deaths(dict.fromkeys(self._dying, -signal.SIGKILL), now)
        if self._awaited and now >= self._awaited_until:
            return [order for node in sorted(self._awaited) for order in self._on_agent_lost(node, now)]
        return self._route(incident.on_tick(now))

    def _on_layout(self, rank: int, layout: Layout, now: float) -> Orders:
        first = next(iter(self._layouts.values()), layout)
        if first.fingerprint != layout.fingerprint:
            return self._refuse(
                rank, f"rank {rank} and rank {first.rank} do not run the same framework or patches"
            )
        if first.goes_back != layout.goes_back:
            return self._refuse(
                rank,
                f"TTP_LOCAL_COPY is {layout.goes_back} on rank {rank} and {first.goes_back} on rank "
                f"{first.rank}: it must be the same on all",
            )
        self._layouts[rank] = layout
        return self._route(self.incident.on_layout()) if self.incident is not None else []

    def _ends(self, ranks: Set[int]) -> None:
        self._unbegun |= ranks - self._layouts.keys()

    def _on_asked(self, rank: int, name: str, who: str, leaves: int, now: float) -> Orders:
        if self.incident is None and self.verdict is None:
            self._causes.ask(rank, who, name, leaves)
        return self._fault(now, by_death=True)  # nothing else explains it

    def _on_still(self, node: int, seconds: float, now: float) -> Orders:
        """A rank that hangs makes all others wait: it is a hang when every node stands still."""
        self._still.add(node)
        if not self._agents <= self._still or self.incident is not None or self.verdict is not None:
            return []
        self._causes.hang_s = seconds
        return self._fault(now, by_death=True)

    def _on_dying(self, rank: int, now: float) -> Orders:
        if rank in self._dead or rank in self._dying:
            return []
        self._dying.add(rank)
        self._ends({rank})
        if self.verdict is None:
            self._causes.unannounced.add(rank)
        return self._bury({rank}, now)

    def _on_deaths(self, statuses: dict[int, int], now: float) -> Orders:
        new = {rank: status for rank, status in statuses.items() if rank not in self._dead}
        self._dead.update(new)
        self._ends(new.keys())
        known = new.keys() & self._dying
        self._dying -= known
        if self.incident is None and not any(new.values()):
            return []
        return self._bury(new.keys() - known, now)

    def _bury(self, ranks: Set[int], now: float) -> Orders:
        if self.incident is None:
            return self._fault(now, by_death=True)
        for rank in ranks:
            self.incident.nodes.pop(rank, None)
        return self._route(self.incident.on_deaths(ranks) if ranks else [])

    def _on_agent_lost(self, node: int, now: float) -> Orders:
        self._agents.discard(node)
        self._awaited.discard(node)
        ranks = [rank for rank, home in self._node_of.items() if home == node and rank not in self._dead]
        self._causes.lost[node] = ranks
        orders = self._on_deaths(dict.fromkeys(ranks, -signal.SIGKILL), now)
        if self.incident is not None:
            orders += self._route(self.incident.on_agent_lost(node))
            orders += self._route(self.incident.on_recalled())
        return orders

    def _on_recalled(self, node: int, verdict: Verdict | None, now: float) -> Orders:
        if node not in self._awaited:
            return []
        self._awaited.discard(node)
        self._awaited_until = now + ROLL_S
        if verdict is not None and self.verdict is None:
            self.verdict = msgspec.structs.replace(verdict, leaves=0)
            return self._farewell(verdict.incident)
        return self._route(self.incident.on_recalled()) if self.incident is not None else []

    def _fault(self, now: float, *, by_death: bool) -> Orders:
        if self.incident is not None or self.verdict is not None:
            return []
        alive = {
            rank: node
            for rank, node in sorted(self._node_of.items())
            if rank not in self._dead and rank not in self._dying and rank in self._connected
        }
        self.incident = Incident(
            self._number,
            alive,
            self._agents,
            self._layouts,
            self._world_size,
            now,
            self._timeout_s,
            self._store,
            self._unbegun,
            self._awaited,
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
        directives: list[Directive] = []
        match message:
            case Progress():
                incident.on_progress(now)
            case Frozen(rank=rank, incident=incident.number, board=board, standing=standing):
                if standing is not None:
                    self._causes.standing[rank] = standing
                directives = incident.on_frozen(rank, board)
            case Prepared(incident=incident.number, folder=folder, reason=reason):
                directives = incident.on_prepared(folder, reason)
            case Written(incident=incident.number):
                directives = incident.on_written(message)
            case WriteFailed(incident=incident.number):
                directives = incident.on_write_failed(message)
            case Renamed(rank=rank, incident=incident.number, reason=reason):
                directives = incident.on_renamed(rank, reason)
            case Published(incident=incident.number, step=step):
                directives = incident.on_published(step)
            case PublishFailed(incident=incident.number, reason=reason):
                directives = incident.on_publish_failed(reason)
        return self._route(directives)

    def _route(self, directives: list[Directive]) -> Orders:
        assert self.incident is not None
        if self.verdict is not None:
            return []
        orders: Orders = []
        for directive in directives:
            if directive.rank is not None:
                node = self._node_of[directive.rank]
                orders.append((node, Addressed(directive.rank, directive.message)))  # type: ignore[arg-type]
            elif directive.node is not None:
                orders.append((directive.node, directive.message))  # type: ignore[arg-type]
        if self.incident.outcome is not None and not self._dying:
            orders += self._pronounce()
        return orders

    def _pronounce(self) -> Orders:
        incident = self.incident
        assert incident is not None
        assert incident.outcome is not None
        outcome = incident.outcome
        cause = self._causes.first(incident.silent)
        if outcome.kind == "lost" and cause.rank in self._causes.ended:
            # Others have ended well before, and their states with them.
            outcome = Outcome("nothing", -1, "the training was over")
        match outcome.kind:
            case "saved":
                kept = outcome.reason or "no finished step is lost"
                line = f"{cause.words}; step {outcome.step} is saved, {kept}"
                line += f"; {incident.doubts.words}" if incident.doubts.words else ""
            case "nothing":
                line = f"{cause.words}; nothing to save: {outcome.reason}"
            case _:
                line = f"{cause.words}; the state cannot be saved: {outcome.reason}"
                if outcome.unheld:
                    line += f"; {self._advice()}"
        self.verdict = Verdict(
            incident.number,
            outcome.kind,
            outcome.step,
            line,
            cause.rank,
            cause.exit_code,
            self.save,
            0 if 0 in self._causes.lost else cause.leaves,
        )
        return self._farewell(incident.number)

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

    @property
    def save(self) -> str:
        """The folder of checkpoints; empty until a rank has told it."""
        return next((layout.save for layout in self._layouts.values()), "")

    def _farewell(self, number: int) -> Orders:
        assert self.verdict is not None
        # First to the agents: no worker exits whose agent does not know the verdict, whatever dies now.
        verdicts: Orders = [(node, self.verdict) for node in sorted(self._agents)]
        return verdicts + [
            (node, Addressed(rank, Exit(number)))
            for rank, node in self._node_of.items()
            if rank not in self._dead
        ]

    def _advice(self) -> str:
        owners: dict[tuple[str, int], list[int]] = {}
        for rank, layout in self._layouts.items():
            for share in layout.shares:
                owners.setdefault((share.group, share.index), []).append(rank)
        if any(len(ranks) == 1 for ranks in owners.values()):
            experts = any(share.foreign for layout in self._layouts.values() for share in layout.shares)
            fewer = "; of experts, a smaller --expert-model-parallel-size" if experts else ""
            return f"a second copy of each shard (TTP_REPLICA=auto{fewer}) would have helped"
        return "second copies of each shard on other nodes, or a shorter --save-interval, would have helped"
