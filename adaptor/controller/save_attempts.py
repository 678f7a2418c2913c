"""The dump of an incident: the groups on disk, the writers of the rest, the folder and its publisher; pure.

`NonFiniteTracker` keeps the groups whose saved state is not finite, and asks for another copy once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath, PurePosixPath

from adaptor.controller.membership import Membership
from adaptor.controller.plan import Group, NoPlan, Plan, plan
from adaptor.protocol import naming
from adaptor.protocol.messages import (
    BoardRecord,
    Dump,
    Find,
    GroupOrder,
    Prepare,
    Prepared,
    Publish,
    Published,
    PublishFailed,
    WriteFailed,
    Written,
)
from adaptor.protocol.naming import FileEntry


@dataclass
class NonFiniteTracker:
    """Doubts each group once: the shards of other holders are then written, whatever they contain.

    The state of a diverged training is not finite, and is saved as before; but a failing device spoils only
    its own copy.

    Attributes:
        ranks: by group, the ranks whose shards were doubted
        notes: by group that is on disk, the note for the verdict; "" without a note
    """

    ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def settle(self, group: str, holders: tuple[int, ...], not_finite: str) -> None:
        """Note that `group` is on disk, from `holders`; `not_finite` names its non-finite parts."""
        spoilt = " and ".join(str(rank) for rank in self.ranks.get(group, ()) if rank not in holders)
        if not_finite:
            self.notes[group] = f"in {group} {not_finite}, as before the failure"
        elif spoilt:
            self.notes[group] = f"what rank {spoilt} held of {group} was not finite, so another copy is saved"
        else:
            self.notes[group] = ""

    @property
    def words(self) -> str:
        """Return the whole note for the verdict."""
        return "; ".join(filter(None, self.notes.values()))


# A dump that fails this often without a death in between will not succeed by another try.
MAX_ATTEMPTS = 5


@dataclass
class Writing:
    """The writing of one incident. Invariant: a group on disk is not written again at the same step.

    Attributes:
        step, attempt: the current ones; attempts of an incident have different numbers
        pending: the groups that are not on disk, with their orders
        avoid: ranks that are chosen only for want of other ranks
        failures: failed attempts since the last death
        newest: no later step is saved; None: any
    """

    membership: Membership
    step: int = -1
    attempt: int = 0
    pending: dict[str, GroupOrder] = field(default_factory=dict)
    files: dict[str, tuple[FileEntry, ...]] = field(default_factory=dict)
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    doubts: NonFiniteTracker = field(default_factory=NonFiniteTracker)
    avoid: set[int] = field(default_factory=set)
    failures: int = 0
    corrupt: frozenset[int] = frozenset()
    newest: int | None = None

    @property
    def origin(self) -> int:
        """Return the step that training started from."""
        return max(layout.origin for layout in self.membership.layouts.values())

    @property
    def uses_script_handlers(self) -> bool:
        """Return True if handlers of the script write and name the checkpoint."""
        return not self.membership.save_folder

    @property
    def taking_part(self) -> set[int]:
        """Return the ranks that have something to do in this attempt."""
        orders = self.pending.values()
        return {order.writer for order in orders}.union(*(order.holders for order in orders))

    @property
    def is_in_place(self) -> bool:
        """Return True if the holders of this attempt may write their shards themselves.

        In place is only for the first attempt, and not for ranks that are better avoided: whatever fails, the
        next attempt needs no disk but the writer's.
        """
        return self.attempt == 1 and self.avoid.isdisjoint(self.taking_part)

    def may_be_held(self, ranks: Collection[int]) -> bool:
        """Return True if one of `ranks` may have each shard, and one may write each group."""
        rank_sets = (
            rank_set
            for group in self.membership.groups.values()
            for rank_set in (*group.owners.values(), group.writers)
        )
        return all(any(rank in ranks for rank in rank_set) for rank_set in rank_sets)

    def decide(
        self, boards: Mapping[int, BoardRecord], unable: Collection[int] = (), step: int | None = None
    ) -> Plan | NoPlan:
        """Return the plan to save the newest step, or only `step`; the ranks in `unable` write nothing."""
        groups = self.membership.groups
        if unable:
            groups = {k: Group(group.owners, group.writers.difference(unable)) for k, group in groups.items()}
        return plan(groups, self._giving(boards), only=step, avoid={*self.avoid, *unable}, newest=self.newest)

    def _giving(self, boards: Mapping[int, BoardRecord]) -> Mapping[int, BoardRecord]:
        """Return the boards of the ranks whose state may be saved."""
        if not self.corrupt:
            return boards
        return {rank: board for rank, board in boards.items() if rank not in self.corrupt}

    def begin(self, decision: Plan) -> None:
        """Begin the dump of a step, of which nothing is on disk."""
        self.step = decision.step
        self.pending = {order.group: order for order in decision.groups}
        self.files = {}

    def rest(self, boards: Mapping[int, BoardRecord], avoid: Collection[int] = ()) -> Plan | NoPlan:
        """Plan the groups that are not on disk yet, or all for handlers of the script, at the same step."""
        names = self.pending.keys() | (self.files.keys() if self.uses_script_handlers else set())
        groups = {name: group for name, group in self.membership.groups.items() if name in names}
        return plan(
            groups, self._giving(boards), only=self.step, avoid={*self.avoid, *avoid}, newest=self.newest
        )

    def elsewhere(self, unreachable_ranks: Collection[int], boards: Mapping[int, BoardRecord]) -> Plan | None:
        """Plan the rest with other writers for `unreachable_ranks`; None if no group can have another."""
        new_plan = self.rest(boards, avoid=unreachable_ranks)
        if isinstance(new_plan, NoPlan):
            return None
        away = {order.group for order in new_plan.groups if order.writer not in unreachable_ranks}
        return new_plan if any(self.pending[group].writer in unreachable_ranks for group in away) else None

    def begin_attempt(self, decision: Plan) -> None:
        """Have the groups of `decision` written, by another attempt."""
        self.pending = {order.group: order for order in decision.groups}
        self.attempt += 1

    def orders(
        self, incident: int, folder: str, store: tuple[str, int, bytes], timeout_s: float
    ) -> dict[int, Dump]:
        """Return the order for each rank that takes part in this attempt."""
        names: dict[int, tuple[str, ...]] = {}
        for name, order in self.pending.items():
            for rank in order.ranks:
                names[rank] = (*names.get(rank, ()), name)
        host, port, secret = store
        in_place = self.is_in_place  # looks at all ranks
        dumps = {  # one for all ranks of the same groups
            groups: Dump(
                incident,
                self.attempt,
                self.step,
                folder,
                groups=tuple(self.pending[name] for name in groups),
                store_host=host,
                store_port=port,
                timeout_s=timeout_s,
                as_is=tuple(self.doubts.ranks),
                store_secret=secret,
                in_place=in_place,
            )
            for groups in set(names.values())
        }
        return {rank: dumps[groups] for rank, groups in names.items()}

    def awaits(self, message: Written | WriteFailed) -> bool:
        """Return True if `message` belongs to this attempt, a pending group, and a rank that was asked."""
        order = self.pending.get(message.group)
        if order is None or message.attempt != self.attempt:
            return False
        if isinstance(message, WriteFailed):
            return message.rank in order.ranks
        return message.rank == order.writer and all(_is_inside(entry.path) for entry in message.files)

    def take(self, message: Written) -> None:
        """Note that a group is on disk."""
        holders = self.holders[message.group] = self.pending.pop(message.group).holders
        self.files[message.group] = message.files
        self.doubts.settle(message.group, holders, message.not_finite)

    def doubt(self, message: WriteFailed) -> None:
        """Avoid the rank that failed, whose state may be unreadable, or the doubted ranks."""
        self.avoid.update(message.doubted or [message.rank])
        if message.doubted:
            self.doubts.ranks[message.group] = message.doubted

    def fails_for_good(self, message: WriteFailed) -> bool:
        """Return True if this was one failure too many; a doubt does not count."""
        self.failures += not message.doubted
        return not message.doubted and self.failures >= MAX_ATTEMPTS

    def rename_rank(self, alive: Collection[int]) -> int:
        """Return the rank whose handler names the checkpoint.

        The holders of the group that came last have not died, or the group would have been planned again.
        """
        return min(rank for group in self.holders.values() for rank in group if rank in alive)

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        """Return the files of all groups that are on disk."""
        return tuple(entry for group in sorted(self.files) for entry in self.files[group])


def _is_inside(path: str) -> bool:
    """Return True if `path` stays below the folder that it is relative to: the file is renamed there."""
    parts = PurePosixPath(path).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in path


FolderOrder = Prepare | Publish | Find

# An error of one node's disk, or of its rights, is worth a try elsewhere; a third error is an error of the
# folder.
MAX_REFUSALS = 3


class PublishTarget:
    """The temporary folder of one incident, and its publisher.

    Invariant: two agents never work on one folder, whether the former agent is lost, cut off, stopped or
    waits for its disk. So a new maker of the folder makes another `number`, and a new publisher gives the
    folder a new number first. Answers count only from the asked node, for the ordered step and folder.

    Args:
        first: the number of the first order; lower numbers belong to incidents that were recovered online.

    Attributes:
        is_first: whether the newest order is the first of the incident
        written: the number of the order for the existing folder
        blocked: nodes on which the save folder does not answer
        hung: whether the publication has hung for too long
    """

    def __init__(self, agents: Collection[int], first: int = 0) -> None:
        self._agents = agents
        self._first = first
        self._refusals: dict[int, str] = {}
        self._asked: dict[
            tuple[type[FolderOrder], int], tuple[int, FolderOrder]
        ] = {}  # by the number of the order
        self.publisher = -1
        self.number = first
        self.written = 0
        self.path = ""
        self.blocked: set[int] = set()
        self.hung = False

    @property
    def is_first(self) -> bool:
        """Return True if the folder belongs to the first attempt of the job's first incident."""
        return self.number == self._first

    def choose(self, node: int) -> None:
        """Choose the agent of `node`, unless its disk is known to fail."""
        self.publisher = min(
            {node, *self._agents},
            key=lambda node_number: (self._fails(node_number), node_number != node, node_number),
        )

    def hand_over(self, last: Collection[int] = ()) -> None:
        """Choose another agent, one of the nodes in `last` only if no other is left."""
        self.number += 1
        self.publisher = min(self._agents, key=lambda node: (node in last, self._fails(node), node))

    def ask(self, order: FolderOrder, node: int) -> None:
        """Note that `order` goes to the agent of `node`: only its answer will count."""
        self._asked[type(order), order.number] = node, order

    def is_from_asked_agent(self, answer: Prepared | Published | PublishFailed) -> bool:
        """Return True if `answer` comes from the node that was asked, for the order that was given."""
        match answer:
            case Prepared(reason=""):
                order = self._order(Prepare, answer)
                return isinstance(order, Prepare) and _is_ordered(answer.folder, order)
            case Prepared():
                return self._order(Prepare, answer) is not None
            case Published(step=step):
                order = self._order(Publish, answer)
                # The other side of a cut network may have saved a later step.
                return (order is not None and step >= order.step) or self._order(Find, answer) is not None
            case PublishFailed():
                return bool(self._order(Publish, answer) or self._order(Find, answer))

    def _order(
        self, kind: type[FolderOrder], answer: Prepared | Published | PublishFailed
    ) -> FolderOrder | None:
        node, order = self._asked.get((kind, answer.number), (-1, None))
        return order if node == answer.node else None

    def _fails(self, node: int) -> bool:
        return node in self.blocked or node in self._refusals

    def refuse(self, reason: str) -> bool:
        """Note the failure of the current agent for this `reason`; return True if another agent is chosen."""
        self._refusals[self.publisher] = reason
        if all(map(self._fails, self._agents)) or len(self._refusals) >= MAX_REFUSALS:
            return False
        self.hand_over()
        return True

    @property
    def remarks(self) -> list[str]:
        """Return the notes on a successful save."""
        blocked_nodes = ", ".join(str(node) for node in sorted(self.blocked))
        further_remarks = [
            f"node {node} could not make or publish its folder: {reason}"
            for node, reason in self._refusals.items()
        ]
        return [f"the save folder does not answer on node {blocked_nodes}"] * bool(
            blocked_nodes
        ) + further_remarks


def _is_ordered(folder: str, order: Prepare) -> bool:
    """Return True if the agent of any generation would make `folder` for `order`."""
    path = PurePath(folder)
    return path.parent == PurePath(order.save_folder) and naming.is_temporary_of(
        path.name, order.step, order.term, order.number
    )
