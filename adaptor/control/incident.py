"""One incident, from the first failure to the verdict, as a state machine without clock, socket or torch.

FREEZING   every live rank closes its door and tells where it stands
PREPARING  an agent makes the temporary folder
DUMPING    the chosen holders bring themselves to the step and write
PUBLISHING an agent checks the files, renames the folder and replaces the tracker; where handlers of the
           script write what is saved, nothing is prepared, and one rank's handler gives it its name
FINDING    nothing can be saved, but the controller that is lost may have had it saved: an agent looks
ENDED      the verdict is out and every worker has been told to exit

Invariants: a step is chosen only when every live rank has answered or run out of time; a group that is on
disk is not written again at the same step; the publish is ordered only when every group is on disk. Who makes
and publishes the folder: `Place`; who is given up: `Detour`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from adaptor.control.choosing import NEVER_BEGUN, choose
from adaptor.control.detour import Detour
from adaptor.control.directing import Directing
from adaptor.control.finding import Finding
from adaptor.control.freezing import Freezing
from adaptor.control.messages import BoardRecord, Layout, Phase, WriteFailed, Written
from adaptor.control.place import Place
from adaptor.control.plan import NoPlan, Plan
from adaptor.control.roll_call import STUCK_S
from adaptor.control.stages import Directive, Outcome, State
from adaptor.control.writing import Writing


@dataclass
class Incident:
    """`nodes` maps the ranks that are alive to their nodes, `agents` are the nodes with an agent.

    The owner takes out what is gone. `unbegun`, `awaited`, `gone`: see `Freezing`; `term`: of the controller,
    0 for the first; `stacks`: the ranks are to tell where they stand; `answer_s`: how long they have for an
    answer, half of the time where it is not said.
    """

    number: int
    nodes: dict[int, int]
    agents: Collection[int]
    layouts: Mapping[int, Layout]
    world_size: int
    opened_at: float
    timeout_s: float
    store: tuple[str, int]
    unbegun: Collection[int] = ()
    awaited: Collection[int] = ()
    gone: Mapping[int, BoardRecord] = field(default_factory=dict)
    term: int = 0
    state: State = State.FREEZING
    outcome: Outcome | None = None
    namer: int = -1
    deadline: float = 0.0
    stacks: bool = False
    answer_s: float = 0.0

    def __post_init__(self) -> None:
        # Time is left for the dump: a rank that has not closed its door by then is no holder.
        half = self.timeout_s / 2
        self.freezing = Freezing(
            *(self.nodes, self.layouts, self.world_size, self.unbegun, self.awaited),
            *(self.gone, self.term > 0, self.opened_at, min(half, self.answer_s or half)),
        )
        self.writing = Writing(self.layouts)
        self.place = Place(self.agents)
        self.detour = Detour(self.nodes, self.agents, self.freezing, self.writing, self.place, self.timeout_s)
        self.finding = Finding(self.freezing, self.writing, self.term > 0, min(STUCK_S, self.timeout_s / 20))
        self.orders = Directing(
            *(self.number, self.term, self.nodes, self.world_size, self.store, self.timeout_s),
            *(self.writing, self.place, self.detour),
        )

    @property
    def step(self) -> int:
        return self.writing.step

    def open(self, by_death: bool) -> list[Directive]:
        """Ask every live rank to freeze. An exception may be the echo of a death that is not known yet.

        Where training has only just begun, another node's word of it may still be on its way.
        """
        self.deadline = self.opened_at + self.timeout_s
        if self.freezing.knows_all:
            return self._freeze()
        if by_death and self.freezing.never_begun:
            return self._end(NEVER_BEGUN)
        self.freezing.wait()
        return []

    def on_layout(self) -> list[Directive]:
        return self._freeze() if self.freezing.waits and self.freezing.knows_all else []

    def _freeze(self) -> list[Directive]:
        self.freezing.ask()
        return self.orders.freeze(self.nodes, stacks=self.stacks) + self._decide_when_frozen()

    def on_joined(self, rank: int, node: int) -> list[Directive]:
        """A rank that was not known to be there when others were asked to freeze."""
        if self.state is not State.FREEZING or rank in self.nodes:
            return []
        self.nodes[rank] = node
        return [] if self.freezing.waits else self.orders.freeze([rank], stacks=self.stacks)

    def on_recalled(self) -> list[Directive]:
        """One node less is `awaited`."""
        if self.freezing.waits:
            return self._end(NEVER_BEGUN) if self.freezing.never_begun else []
        return self._decide_when_frozen()

    def on_frozen(self, rank: int, board: BoardRecord) -> list[Directive]:
        if board.finished >= self.step and board.phase != Phase.UNREADABLE:
            # Else its main thread has not come through the door, or never will.
            self.detour.roll_call.answer(rank)
        if self.state is not State.FREEZING or rank not in self.nodes:
            return []
        self.freezing.hear(rank, board)
        return self._decide_when_frozen()

    def on_deaths(self, ranks: Collection[int]) -> list[Directive]:
        """`ranks` are no longer in `nodes`."""
        if self.freezing.waits:
            return self._end(NEVER_BEGUN) if self.freezing.never_begun else []
        for rank in ranks:
            self.freezing.forget(rank)
        if self.state is State.FREEZING:
            return self._decide_when_frozen()
        if self.state is State.DUMPING and not self.writing.taking_part.isdisjoint(ranks):
            self.writing.failures = 0
            return self._dump_again()
        if self.state is State.PUBLISHING and self.namer in ranks:
            return self._lose(f"rank {self.namer} has died while its handler gave step {self.step} its name")
        return []

    def on_agent_lost(self, node: int) -> list[Directive]:
        """The agent of `node` is no longer in `agents`; the deaths of its ranks were told before."""
        if node != self.place.publisher or self.state in (State.FINDING, State.ENDED):
            return []
        self.place.hand_over()
        if self.state is State.PREPARING:
            return [self.orders.prepare()]
        return [self.orders.publish()] if self.state is State.PUBLISHING else []

    def on_prepared(self, folder: str, reason: str, number: int) -> list[Directive]:
        if self.state is not State.PREPARING or number != self.place.number:
            return []
        if reason:
            return [self.orders.prepare()] if self.place.refuse(reason) else self._lose(reason)
        self.place.path, self.place.written = folder, number
        self.state = State.DUMPING
        return self._dump_again()

    def on_written(self, message: Written, now: float) -> list[Directive]:
        if self.state is not State.DUMPING or not self.writing.awaits(message):
            return []
        self.writing.take(message)
        self.on_progress(self.nodes.get(message.rank, -1), now)  # who takes no part may say so, too
        if self.writing.pending:
            return []
        self.state = State.PUBLISHING
        if not self.writing.handled:
            return [self.orders.publish()]
        self.namer = self.writing.namer(self.nodes)
        return [self.orders.rename(self.namer)]

    def on_write_failed(self, message: WriteFailed) -> list[Directive]:
        self.writing.doubt(message)
        if message.rank in self.freezing.boards and not message.board.provides(self.step):
            # It will not come to that step any more; with a local copy it still gives the one before.
            self.freezing.hear(message.rank, message.board)
        if self.state is not State.DUMPING or not self.writing.awaits(message):
            return []
        if self.writing.fails_for_good(message):
            return self._lose(f"{message.group} could not be written: {message.reason}")
        return self._dump_again()

    def on_published(self, step: int) -> list[Directive]:
        if self.state is State.FINDING:
            return self._end(self.finding.found(step))
        if self.state is not State.PUBLISHING:
            return []
        step = max(self.step, step)
        return self._end(Outcome("saved", step, self.freezing.further(step)))

    def on_renamed(self, rank: int, reason: str) -> list[Directive]:
        if self.state is not State.PUBLISHING or rank != self.namer:
            return []
        return self._lose(reason) if reason else self.on_published(self.step)

    def on_publish_failed(self, reason: str, number: int) -> list[Directive]:
        if number != self.place.number:
            return []
        if self.state is State.FINDING:
            self.finding.found_nothing()
        if self.state is not State.PUBLISHING:
            return []
        return [self.orders.publish()] if self.place.refuse(reason) else self._lose(reason)

    def on_progress(self, node: int, now: float) -> None:
        """The save moves: what it takes is not counted against the time of the incident."""
        if self.state in (State.DUMPING, State.PUBLISHING):
            self.deadline = max(self.deadline, now + self.timeout_s)
            self.detour.moved(node)

    def on_tick(self, now: float) -> list[Directive]:
        if self.state is State.ENDED:
            return []
        if self.freezing.waits:
            return self._go_on_without_layouts(now) if self.freezing.is_late(now) else []
        if self.state is State.FINDING:
            return self._look_again(now)
        if now >= self.deadline - self.finding.patience_s:
            return self._run_out_of_time()
        if self.state is State.FREEZING and self.freezing.lose_patience(now):
            return self._decide_when_frozen()
        if self.state is State.DUMPING and self.detour.roll_call.is_due(now):
            if self.detour.leave_the_stuck():
                return self._dump_again()
            # Nothing moves: an order that they have followed already costs nothing, and is answered.
            return self.orders.freeze(self.detour.roll_call.call(self.writing.taking_part))
        if self.state in (State.PREPARING, State.DUMPING, State.PUBLISHING):
            overdue = self.detour.overdue(now, dumping=self.state is State.DUMPING)
            return self._go_on_elsewhere(overdue) if overdue else []
        return []

    def _run_out_of_time(self) -> list[Directive]:
        if self.state is State.DUMPING and (reason := self.detour.only_the_stuck):
            return self._lose(reason, unheld=True)
        state = self.state.name.lower()
        return self._lose(f"not done after {self.timeout_s:g} s (TTP_OT) in state {state}")

    def _go_on_elsewhere(self, overdue: set[int]) -> list[Directive]:
        """Have other nodes do what `overdue` ones were to do with the save folder, where they can."""
        if self.state is State.PUBLISHING:
            return [self.orders.publish()] if self.detour.publish(overdue) else []
        if self.state is State.PREPARING:
            return [self.orders.prepare()] if self.detour.prepare(overdue) else []
        if (again := self.detour.dump(overdue)) is None:
            return []
        return self._order_dump(again) if again.step == self.step else self._begin(again)

    def _decide_when_frozen(self) -> list[Directive]:
        return self._choose() if self.state is State.FREEZING and self.freezing.is_over else []

    def _go_on_without_layouts(self, now: float) -> list[Directive]:
        """Ask those who are there: they know whether a step has finished."""
        if self.freezing.never_begun or not self.layouts:
            return self._end(NEVER_BEGUN)
        self.freezing.hurry(now + STUCK_S)
        return self._freeze()

    def _choose(self) -> list[Directive]:
        """Take the newest step that there is now."""
        decision = choose(self.freezing, self.writing, self.detour.stuck)
        return self._begin(decision) if isinstance(decision, Plan) else self._end(decision)

    def _begin(self, decision: Plan) -> list[Directive]:
        self.writing.begin(decision)
        if self.writing.handled:
            self.state = State.DUMPING
            return self._dump_again()
        self.state = State.PREPARING
        self.place.choose(self.nodes[min(order.writer for order in decision.groups)])
        return [self.orders.prepare()]

    def _dump_again(self) -> list[Directive]:
        """Plan for the groups that are not on disk: at the same step if possible, else from the start."""
        again = self.writing.rest(self.freezing.boards)
        return self._choose() if isinstance(again, NoPlan) else self._order_dump(again)

    def _order_dump(self, again: Plan) -> list[Directive]:
        self.writing.begin_attempt(again)
        self.freezing.let_through(self.writing.taking_part, self.step)
        return self.orders.dump()

    def _lose(self, reason: str, *, unheld: bool = False) -> list[Directive]:
        return self._end(Outcome("lost", -1, reason, unheld))

    def _end(self, outcome: Outcome) -> list[Directive]:
        if outcome.kind != "saved" and outcome != NEVER_BEGUN and self.finding.may_find:
            self.state, self.finding.otherwise = State.FINDING, outcome
            self.place.number += 1
            return [self.orders.find(self.finding.step)]
        self.state, self.outcome = State.ENDED, outcome
        return []

    def _look_again(self, now: float) -> list[Directive]:
        if self.finding.is_over(now, self.deadline):
            self.state, self.outcome = State.ENDED, self.finding.otherwise
            return []
        return [self.orders.find(self.finding.step)] if self.finding.is_due() else []
