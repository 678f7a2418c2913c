"""Chooses the step to save, the holder of each shard, and the writer of each group's files: a pure function.

A rank has *finished* a step here when the rank has made the update itself (`BoardRecord.finished`); a job has
finished a step already when the first rank begins the update (docs/promises.md).

Why a step exists while every shard has a live holder: the gradients of a step are reduced over the whole
batch, to which every rank contributes, directly or through the ranks of its model. So no rank comes to the
door of step m before every rank has finished step m-1. Let m be the newest step whose update any rank has
begun, dead ranks included.

With the barrier, every rank was READY for m before: every live rank has finished m, or can be let through.

With local copies, every live rank has finished m-1. A frozen rank is in one of three cases:

- It has not begun the update of m: m-1 is its live state.
- It has made that update: m-1 is in its copy, until the window of m+1 opens.
- An exception has left that update in the middle: m-1 is in its copy, which is whole.

So every live rank gives m-1. Ranks at the door of m give m, too, unless an exception has left their update:
once every rank has come to the door, m is saved as with the barrier.

A training loop whose ranks do not depend on each other may have no common step; the reason says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from adaptor.protocol.messages import BoardRecord, GroupOrder, Phase, Share


@dataclass(frozen=True)
class Plan:
    """Save `step`; one order for each group, sorted by its name."""

    step: int
    groups: tuple[GroupOrder, ...]


@dataclass(frozen=True)
class NoPlan:
    """The result if no step has a live holder of every shard; `reason` names the missing shard."""

    reason: str


@dataclass
class Group:
    """The holders of a group's shards, dead ranks included.

    Attributes:
        owners: of each shard (index, count), in the order of shards: its holders, in order
        writers: the ranks that can write the group's files
    """

    owners: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    writers: set[int] = field(default_factory=set)


Groups = Mapping[str, Group]

# More steps in a row than anyone skips. Ranks are at most one step apart, so the newest are enough.
_SKIPPED = 1000


def groups_of(shares: Mapping[int, Iterable[Share]]) -> Groups:
    """Return the holders of all shards, from the shares of each rank; sorted by name."""
    groups: dict[str, Group] = {}
    for rank in sorted(shares):
        for share in shares[rank]:
            if (group := groups.get(share.group)) is None:
                group = groups[share.group] = Group()
            if (share.index, share.count) not in group.owners:
                for index in (*range(share.count), share.index):
                    group.owners.setdefault((index, share.count), [])
            group.owners[share.index, share.count].append(rank)
            if share.can_write:
                group.writers.add(rank)
    for group in groups.values():
        group.owners = dict(sorted(group.owners.items()))
    return dict(sorted(groups.items()))


def plan(
    groups: Groups,
    alive: Mapping[int, BoardRecord],
    only: int | None = None,
    avoid: Collection[int] = (),
    newest: int | None = None,
) -> Plan | NoPlan:
    """Return the largest step whose shards all have live holders, with the order for each group.

    A step that no rank has begun is taken only for want of other steps. A rank that is let through to the
    step gives up the step before, at which other ranks may be; after one more death no common step might be
    left.

    Args:
        alive: the boards of the ranks with readable state.
        avoid: ranks that are chosen only for want of other holders.
        newest: no later step is taken: the holders of its state differ. None: any.
    """
    if not groups:
        return NoPlan("no rank has told what it holds")
    alike = _group_equal_boards(alive)
    boards = [board for board, _ in alike]
    steps = {s for board in boards for s in steps_of(board)} if only is None else {only}
    if newest is not None:
        steps = {s for s in steps if s <= newest}
        if not steps:
            agreed = f"; they agreed on step {newest}, which nobody has any more" if newest >= 0 else ""
            return NoPlan(f"the holders of the state differ{agreed}")
    for step in sorted(steps, key=lambda step: (may_have_begun(step, boards), step), reverse=True):
        live_ranks = set().union(*(ranks for board, ranks in alike if board.provides(step)))
        orders = _orders(groups, live_ranks, avoid)
        if orders is not None:
            return Plan(step, orders)
    return NoPlan(_missing(groups, alive))


# The fields of a board about steps; one look-up costs a third of four by name, for each rank of the job.
_OF_STEPS = attrgetter("phase", "oldest", "finished", "ahead")


def _group_equal_boards(boards: Mapping[int, BoardRecord]) -> list[tuple[BoardRecord, list[int]]]:
    """Return boards that differ in their steps, with the ranks of equal boards: few of thousands differ."""
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, state_of_steps in zip(boards, map(_OF_STEPS, boards.values()), strict=True):
        alike[state_of_steps].append(rank)
    return [(boards[ranks[0]], ranks) for ranks in alike.values()]


def _orders(groups: Groups, live_ranks: set[int], avoid: Collection[int]) -> tuple[GroupOrder, ...] | None:
    """Return one order for each group, of ranks in `live_ranks`; None if a shard or a writer is missing."""
    preferred = live_ranks.difference(avoid)
    orders: list[GroupOrder] = []
    for name, group in groups.items():
        holders: list[int] = []
        for owners in group.owners.values():
            holder: int | None = owners[0] if owners else None
            if holder not in preferred:
                holder = _first(owners, preferred, live_ranks)
            if holder is None:
                return None
            holders.append(holder)
        able = group.writers & live_ranks
        if not able:
            return None
        orders.append(GroupOrder(name, tuple(holders), _writer(holders, able, avoid)))
    return tuple(orders)


def _first(ranks: list[int], *choices: set[int]) -> int | None:
    """Return the first of `ranks` in the first of `choices` that has any."""
    for choice in choices:
        for rank in ranks:
            if rank in choice:
                return rank
    return None


def steps_of(board: BoardRecord) -> list[int]:
    """Return the newest steps whose state a rank gives, in order."""
    newest = range(max(board.oldest, board.finished - _SKIPPED), board.finished + 1)
    return [s for s in (*newest, board.ahead) if board.provides(s)]


def may_have_begun(step: int, boards: Collection[BoardRecord]) -> bool:
    """Return True if a rank, alive or dead, may have begun `step`: every live rank was READY for `step`."""
    for board in boards:
        if step <= board.finished or (board.phase == Phase.UPDATING and step == board.ahead):
            return True
    # A READY rank is left out: no rank can be further than the step for which another is READY.
    alive = (Phase.RUNNING, Phase.UNREADABLE)
    return not any(board.phase in alive and board.ahead < step for board in boards)


def _writer(holders: Collection[int], able: set[int], avoid: Collection[int]) -> int:
    """Return the writer of a group: a rank that gives a shard anyway, if possible."""
    preferred = able.difference(avoid) or able
    return min(preferred.intersection(holders) or preferred)


def _missing(groups: Groups, alive: Mapping[int, BoardRecord]) -> str:
    def given(ranks: Iterable[int]) -> bool:
        return any(rank in alive and steps_of(alive[rank]) for rank in ranks)

    for name, group in groups.items():
        for (index, count), owners in group.owners.items():
            if not given(owners):
                ranks = " and ".join(map(str, owners)) or "nobody"
                return f"shard {index} of {count} of group {name} has no live holder, it was on rank {ranks}"
    for name, group in groups.items():
        if not given(group.writers):
            ranks = " and ".join(map(str, sorted(group.writers)))
            return f"nobody is left who can write group {name}, that was rank {ranks}"
    return "every shard has a live holder, but there is no step that all of them hold"
