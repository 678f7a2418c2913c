"""What of the step that is saved is on disk, and who gives and who writes the rest; pure, without a clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control.doubts import Doubts
from adaptor.control.messages import BoardRecord, Dump, GroupOrder, Layout, WriteFailed, Written
from adaptor.control.plan import Group, Groups, NoPlan, Plan, groups_of, plan

# A dump that fails this often although nobody died in between will not succeed by trying again.
MAX_ATTEMPTS = 5


@dataclass
class Writing:
    """Of one incident. Invariant: a group that is on disk is not written again at the same step.

    step, attempt  that are being written; no two attempts of an incident have the same number
    pending        the groups that are not on disk, and who is at them
    files          of those that are, and the `holders` who gave them
    avoid          ranks that are chosen only for what nobody else can give, or write
    failures       attempts that have failed since the last death
    """

    layouts: Mapping[int, Layout]
    step: int = -1
    attempt: int = 0
    pending: dict[str, GroupOrder] = field(default_factory=dict)
    files: dict[str, tuple[FileEntry, ...]] = field(default_factory=dict)
    holders: dict[str, tuple[int, ...]] = field(default_factory=dict)
    doubts: Doubts = field(default_factory=Doubts)
    avoid: set[int] = field(default_factory=set)
    failures: int = 0
    _told: int = 0
    _groups: Groups = field(default_factory=dict)

    @property
    def save(self) -> str:
        """The folder of checkpoints."""
        return self.layouts[min(self.layouts)].save

    @property
    def origin(self) -> int:
        """The step that training started from."""
        return max(layout.origin for layout in self.layouts.values())

    @property
    def handled(self) -> bool:
        """Whether handlers of the script write and name what is saved."""
        return not self.save

    @property
    def taking_part(self) -> set[int]:
        return {rank for order in self.pending.values() for rank in order.ranks}

    @property
    def groups(self) -> Groups:
        """Who holds what, as far as ranks have told it; who tells it twice says the same."""
        if len(self.layouts) != self._told:
            self._told = len(self.layouts)
            self._groups = groups_of({rank: layout.shares for rank, layout in self.layouts.items()})
        return self._groups

    def decide(self, boards: Mapping[int, BoardRecord], unable: Collection[int] = ()) -> Plan | NoPlan:
        """The newest step that there is now, with all its groups; `unable` ranks can write nothing."""
        groups = self.groups
        if unable:
            groups = {k: Group(group.owners, group.writers.difference(unable)) for k, group in groups.items()}
        return plan(groups, boards, avoid={*self.avoid, *unable})

    def begin(self, decision: Plan) -> None:
        """Nothing of this step is on disk."""
        self.step = decision.step
        self.pending = {order.group: order for order in decision.groups}
        self.files = {}

    def rest(self, boards: Mapping[int, BoardRecord], avoid: Collection[int] = ()) -> Plan | NoPlan:
        """For the groups that are not on disk, at the same step; `avoid` these ranks, too.

        Handlers write all of it again.
        """
        names = self.pending.keys() | (self.files.keys() if self.handled else set())
        groups = {name: group for name, group in self.groups.items() if name in names}
        return plan(groups, boards, only=self.step, avoid={*self.avoid, *avoid})

    def elsewhere(self, there: Collection[int], boards: Mapping[int, BoardRecord]) -> Plan | None:
        """The rest with other writers for those that are `there`; None where no group can have another."""
        again = self.rest(boards, avoid=there)
        if isinstance(again, NoPlan):
            return None
        away = {order.group for order in again.groups if order.writer not in there}
        return again if any(self.pending[group].writer in there for group in away) else None

    def begin_attempt(self, decision: Plan) -> None:
        self.pending = {order.group: order for order in decision.groups}
        self.attempt += 1

    def orders(self, incident: int, folder: str, store: tuple[str, int], timeout_s: float) -> dict[int, Dump]:
        """What each rank that takes part in this attempt is to do."""
        names: dict[int, tuple[str, ...]] = {}
        for name, order in self.pending.items():
            for rank in order.ranks:
                names[rank] = (*names.get(rank, ()), name)
        what = (incident, self.attempt, self.step, folder)
        rest = (*store, timeout_s, tuple(self.doubts.ranks))
        dumps = {  # one for all who take part in the same groups
            groups: Dump(*what, tuple(self.pending[name] for name in groups), *rest)
            for groups in set(names.values())
        }
        return {rank: dumps[groups] for rank, groups in names.items()}

    def awaits(self, message: Written | WriteFailed) -> bool:
        """Whether it is of this attempt, and of a group that is not on disk."""
        return message.attempt == self.attempt and message.group in self.pending

    def take(self, message: Written) -> None:
        """A group is on disk."""
        holders = self.holders[message.group] = self.pending.pop(message.group).holders
        self.files[message.group] = message.files
        self.doubts.settle(message.group, holders, message.not_finite)

    def doubt(self, message: WriteFailed) -> None:
        """Who fails may be alive and its state unreadable; who doubts is well."""
        self.avoid.update(message.doubted or [message.rank])
        if message.doubted:
            self.doubts.ranks[message.group] = message.doubted

    def fails_for_good(self, message: WriteFailed) -> bool:
        """Whether this was one failure too many; a doubt is none."""
        self.failures += not message.doubted
        return not message.doubted and self.failures >= MAX_ATTEMPTS

    def namer(self, alive: Collection[int]) -> int:
        """Who calls the handler that gives it its name.

        Those of the group that came last have not died, or it would have been planned again.
        """
        return min(rank for group in self.holders.values() for rank in group if rank in alive)

    @property
    def all_files(self) -> tuple[FileEntry, ...]:
        return tuple(entry for group in sorted(self.files) for entry in self.files[group])
