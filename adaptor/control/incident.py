"""One incident, from the first failure to the verdict, as a state machine without clock, socket or torch.

FREEZING   every live rank closes its door and tells where it stands
PREPARING  an agent makes the temporary folder
DUMPING    the chosen holders bring themselves to the step and write
PUBLISHING an agent checks the files, renames the folder and replaces the tracker; where handlers of the
           script write what is saved, nothing is prepared, and one rank's handler gives it its name
ENDED      the verdict is out and every worker has been told to exit

Invariants: a step is chosen only when every live rank has answered or run out of time; a group that is on
disk is not written again at the same step; the publish is ordered only when every group is on disk; one agent
prepares and publishes, and another takes over only when that agent is lost; a holder is given up only where
others can give all of the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.doubts import Doubts
from adaptor.control.messages import (
    BoardRecord,
    Dump,
    Freeze,
    GroupOrder,
    Layout,
    Phase,
    Prepare,
    Publish,
    Rename,
    WriteFailed,
    Written,
)
from adaptor.control.plan import NoPlan, Plan, plan, shares_of
from adaptor.control.roll_call import RollCall

# A dump that fails this often although nobody died in between will not succeed by trying again.
MAX_ATTEMPTS = 5
# A process that dies closes its connections before its parent learns of it: freeing some GB takes a second.
EXPLANATION_S = 2.0
# A dump moves several times a second, on a slow disk too; and the thread that answers does nothing else.
STUCK_S = 5.0


class State(Enum):
    FREEZING = auto()
    PREPARING = auto()
    DUMPING = auto()
    PUBLISHING = auto()
    ENDED = auto()


@dataclass(frozen=True)
class Outcome:
    """How it ended: `kind` is saved, nothing or lost; `reason`, or what is to be said, is for the user.

    `unheld`: it is lost because a shard has no live holder, not because a save failed.
    """

    kind: str
    step: int
    reason: str
    unheld: bool = False


@dataclass(frozen=True)
class Directive:
    """An order to one rank (`rank` set), or to the agent of one node."""

    message: Freeze | Dump | Rename | Prepare | Publish
    rank: int | None = None
    node: int | None = None


@dataclass
class Incident:
    """`nodes` maps the ranks that are alive to their nodes, `agents` are the nodes with an agent.

    The owner takes out what is gone. `unbegun` ended before training had begun on them, so that no step has
    finished. `awaited` are nodes that may yet come to a controller that has taken the place of another; its
    `term` is 0 for the first. `silent` did not close their doors in time, `stuck` were given up in the dump.
    `stacks`: the ranks are to tell where they stand; `answer_s`: how long they have for an answer, half of
    the time where it is not said.
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
    term: int = 0
    state: State = State.FREEZING
    outcome: Outcome | None = None
    frozen: dict[int, BoardRecord] = field(default_factory=dict)
    step: int = -1
    newest: int = -1
    attempt: int = 0
    folder: str = ""
    pending: dict[str, GroupOrder] = field(default_factory=dict)
    written: dict[str, tuple[FileEntry, ...]] = field(default_factory=dict)
    writers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    doubts: Doubts = field(default_factory=Doubts)
    failures: int = 0
    avoid: set[int] = field(default_factory=set)
    silent: list[int] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)
    publisher: int = -1
    namer: int = -1
    deadline: float = 0.0
    freeze_deadline: float = 0.0
    explained_by: float = 0.0
    stacks: bool = False
    answer_s: float = 0.0
    roll_call: RollCall = field(init=False)

    def __post_init__(self) -> None:
        # Some that are stuck, one after the other, still leave time for the dump.
        self.roll_call = RollCall(min(STUCK_S, self.timeout_s / 8))

    def open(self, by_death: bool) -> list[Directive]:
        """Ask every live rank to freeze. An exception may be the echo of a death that is not known yet.

        Where training has only just begun, another node's word of it may still be on its way.
        """
        self.deadline = self.opened_at + self.timeout_s
        # Time is left for the dump: a rank that has not closed its door by then is no holder.
        half = self.timeout_s / 2
        self.freeze_deadline = self.opened_at + min(half, self.answer_s or half)
        if len(self.layouts) == self.world_size:
            return self._freeze()
        if by_death and self.unbegun and not self.awaited:
            return self._end_before_training()
        self.explained_by = self.opened_at + EXPLANATION_S
        return []

    def on_layout(self) -> list[Directive]:
        if not self.explained_by or len(self.layouts) < self.world_size:
            return []
        self.explained_by = 0.0
        return self._freeze()

    def _freeze(self) -> list[Directive]:
        return [self._order_freeze(rank) for rank in self.nodes] + self._decide_when_frozen()

    def _order_freeze(self, rank: int) -> Directive:
        return Directive(Freeze(self.number, self.stacks), rank=rank)

    def on_joined(self, rank: int, node: int) -> list[Directive]:
        """A rank that was not known to be there when others were asked to freeze."""
        if self.state is not State.FREEZING or rank in self.nodes:
            return []
        self.nodes[rank] = node
        return [] if self.explained_by else [self._order_freeze(rank)]

    def on_recalled(self) -> list[Directive]:
        """One node less is `awaited`."""
        if self.explained_by:
            return self._end_before_training() if self.unbegun and not self.awaited else []
        return self._decide_when_frozen()

    def on_frozen(self, rank: int, board: BoardRecord) -> list[Directive]:
        if board.finished >= self.step:  # else its main thread has not come through the door
            self.roll_call.answer(rank)
        if self.state is not State.FREEZING or rank not in self.nodes:
            return []
        self.frozen[rank] = board
        self.newest = max(self.newest, _newest(board))
        return self._decide_when_frozen()

    def on_deaths(self, ranks: Collection[int]) -> list[Directive]:
        """`ranks` are no longer in `nodes`."""
        if self.explained_by:
            return self._end_before_training() if self.unbegun and not self.awaited else []
        for rank in ranks:
            self.frozen.pop(rank, None)
        if self.state is State.FREEZING:
            return self._decide_when_frozen()
        taking_part = {rank for order in self.pending.values() for rank in order.ranks}
        if self.state is State.DUMPING and not taking_part.isdisjoint(ranks):
            self.failures = 0
            return self._dump_again()
        if self.state is State.PUBLISHING and self.namer in ranks:
            return self._end(
                "lost", -1, f"rank {self.namer} has died while its handler gave step {self.step} its name"
            )
        return []

    def on_agent_lost(self, node: int) -> list[Directive]:
        """The agent of `node` is no longer in `agents`; the deaths of its ranks were told before."""
        if node != self.publisher or self.state is State.ENDED:
            return []
        self.publisher = min(self.agents)
        if self.state is State.PREPARING:
            return [self._order_prepare()]
        if self.state is State.PUBLISHING:
            return [self._order_publish()]
        return []

    def on_prepared(self, folder: str, reason: str) -> list[Directive]:
        if self.state is not State.PREPARING:
            return []
        if reason:
            return self._end("lost", -1, reason)
        self.folder = folder
        self.state = State.DUMPING
        return self._dump_again()

    def on_written(self, message: Written) -> list[Directive]:
        if not self._is_awaited(message):
            return []
        holders = self.writers[message.group] = self.pending.pop(message.group).holders
        self.written[message.group] = message.files
        self.roll_call.moved()
        self.doubts.settle(message.group, holders, message.not_finite)
        if self.pending:
            return []
        self.state = State.PUBLISHING
        return [self._order_rename() if self._handled else self._order_publish()]

    def on_write_failed(self, message: WriteFailed) -> list[Directive]:
        # Who fails may be alive and its state unreadable; who doubts is well.
        self.avoid.update(message.doubted or [message.rank])
        if message.doubted:
            self.doubts.ranks[message.group] = message.doubted
        if not self._is_awaited(message):
            return []
        if message.doubted:
            return self._dump_again()
        self.failures += 1
        if self.failures >= MAX_ATTEMPTS:
            return self._end("lost", -1, f"{message.group} could not be written: {message.reason}")
        return self._dump_again()

    def _is_awaited(self, message: Written | WriteFailed) -> bool:
        """Whether it is of this attempt, and of a group that is not on disk."""
        dumping = self.state is State.DUMPING and message.attempt == self.attempt
        return dumping and message.group in self.pending

    def on_published(self, step: int) -> list[Directive]:
        if self.state is not State.PUBLISHING:
            return []
        self.step = max(self.step, step)
        # Ranks of a job with local copies may have gone back; and who was further may be dead by now.
        newest = max([self.newest, *map(_newest, self.frozen.values())])
        reason = "" if newest <= self.step else f"step {newest} was not finished on every rank"
        return self._end("saved", self.step, reason)

    def on_renamed(self, rank: int, reason: str) -> list[Directive]:
        if rank != self.namer:
            return []
        return self.on_publish_failed(reason) if reason else self.on_published(self.step)

    def on_publish_failed(self, reason: str) -> list[Directive]:
        if self.state is not State.PUBLISHING:
            return []
        return self._end("lost", -1, reason)

    def on_progress(self, now: float) -> None:
        """The save moves: what it takes is not counted against the time of the incident."""
        if self.state in (State.DUMPING, State.PUBLISHING):
            self.deadline = max(self.deadline, now + self.timeout_s)
            self.roll_call.moved()

    def on_tick(self, now: float) -> list[Directive]:
        if self.state is State.ENDED:
            return []
        if self.explained_by:
            return self._end_before_training() if now >= self.explained_by else []
        if now >= self.deadline:
            waiting = f"in state {self.state.name.lower()}"
            return self._end("lost", -1, f"not done after {self.timeout_s:g} s (TTP_OT) {waiting}")
        if self.state is State.FREEZING and now >= self.freeze_deadline:
            self.silent = [rank for rank in self.nodes if rank not in self.frozen]
            for rank in self.silent:
                del self.nodes[rank]
            return self._decide_when_frozen()
        if self.state is State.DUMPING and self.roll_call.is_due(now):
            return self._go_on_without_the_stuck() or self._call_the_roll()
        return []

    def _call_the_roll(self) -> list[Directive]:
        """Nothing moves: an order that they have followed already costs nothing, and is answered."""
        taking_part = {rank for order in self.pending.values() for rank in order.ranks}
        return [Directive(Freeze(self.number), rank=rank) for rank in self.roll_call.call(taking_part)]

    def _go_on_without_the_stuck(self) -> list[Directive]:
        """Plan without those who have not answered, where others can give what they were chosen for."""
        stuck = self.roll_call.unanswered
        others = {rank: board for rank, board in self.frozen.items() if rank not in stuck}
        if not stuck or isinstance(self._plan_rest(others), NoPlan):
            return []
        self.stuck += sorted(stuck)
        for rank in stuck:
            del self.nodes[rank], self.frozen[rank]
        return self._dump_again()

    def _plan_rest(self, boards: Mapping[int, BoardRecord]) -> Plan | NoPlan:
        """For the groups that are not on disk, at the same step; handlers write all of it again."""
        groups = self.pending.keys() | (self.written.keys() if self._handled else set())
        shares = shares_of(self.layouts, groups)
        return plan(shares, boards, only=self.step, avoid=self.avoid)

    def _decide_when_frozen(self) -> list[Directive]:
        if self.state is not State.FREEZING or self.awaited or not self.nodes.keys() <= self.frozen.keys():
            return []
        return self._choose()

    def _choose(self) -> list[Directive]:
        """Take the newest step that there is now."""
        origin = max(layout.origin for layout in self.layouts.values())
        decision = plan(shares_of(self.layouts), self.frozen, avoid=self.avoid)
        if isinstance(decision, NoPlan):
            silent = "".join(
                f"; rank {rank} is alive, but does not answer" for rank in self.silent + self.stuck
            )
            return self._end("lost", -1, decision.reason + silent, unheld=True)
        if decision.step <= origin:
            reason = f"no step has finished since step {origin}" if origin else "no step has finished"
            return self._end("nothing", origin, reason)
        self.step = decision.step
        self.pending = {order.group: order for order in decision.groups}
        self.written = {}
        if self._handled:
            self.state = State.DUMPING
            return self._dump_again()
        self.state = State.PREPARING
        self.publisher = self.nodes[min(order.writer for order in decision.groups)]
        return [self._order_prepare()]

    def _order_prepare(self) -> Directive:
        return Directive(Prepare(self.number, self._save(), self.step, self.term), node=self.publisher)

    def _dump_again(self) -> list[Directive]:
        """Plan for the groups that are not on disk: at the same step if possible, else from the start."""
        again = self._plan_rest(self.frozen)
        if isinstance(again, NoPlan):
            return self._choose()
        self.pending = {order.group: order for order in again.groups}
        self.attempt += 1
        self.roll_call.moved()
        orders: dict[int, list[GroupOrder]] = {}
        for order in again.groups:
            for rank in order.ranks:
                orders.setdefault(rank, []).append(order)
        for rank in orders:
            board = self.frozen[rank]
            if (
                board.finished < self.step
            ):  # it goes through the door now; without a copy there is no way back
                oldest = board.finished if self.layouts[rank].goes_back else self.step
                self.frozen[rank] = msgspec.structs.replace(
                    board, phase=Phase.RUNNING, oldest=oldest, finished=self.step
                )
        host, port = self.store
        return [
            Directive(
                Dump(
                    self.number,
                    self.attempt,
                    self.step,
                    self.folder,
                    tuple(groups),
                    host,
                    port,
                    self.timeout_s,
                    tuple(self.doubts.ranks),
                ),
                rank=rank,
            )
            for rank, groups in orders.items()
        ]

    def _order_publish(self) -> Directive:
        files = tuple(entry for group in sorted(self.written) for entry in self.written[group])
        order = Publish(self.number, self._save(), self.step, files, self.writers, self.world_size, self.term)
        return Directive(order, node=self.publisher)

    def _order_rename(self) -> Directive:
        # Those of the group that came last have not died, or it would have been planned again.
        self.namer = min(rank for holders in self.writers.values() for rank in holders if rank in self.nodes)
        return Directive(Rename(self.number, self.step), rank=self.namer)

    @property
    def _handled(self) -> bool:
        """Whether handlers of the script write and name what is saved."""
        return not self._save()

    def _save(self) -> str:
        return self.layouts[min(self.layouts)].save

    def _end_before_training(self) -> list[Directive]:
        return self._end("nothing", -1, "no step has finished: training had not begun on every rank")

    def _end(self, kind: str, step: int, reason: str, *, unheld: bool = False) -> list[Directive]:
        self.state = State.ENDED
        self.outcome = Outcome(kind, step, reason, unheld)
        return []


def _newest(board: BoardRecord) -> int:
    """The newest step that this rank has finished, or has left in its middle."""
    return board.ahead if board.phase == Phase.BROKEN else board.finished
