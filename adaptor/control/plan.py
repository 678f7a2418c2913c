"""Which step to save, and who gives which shard: a pure function of boards and layout.

Why there is such a step while every shard has a live holder. The gradients of a step are reduced over the
whole batch, to which every rank contributes in that step, directly or through those with which it shares a
model. So nobody comes to the door of step m before everybody has finished step m-1. Let m be the newest step
whose update anyone has begun, the dead included.

With the barrier, everyone was READY for m before: every live rank has finished m, or can be let through.

With local copies, every live rank has finished m-1. Once frozen, it has not begun the update of m, and has
m-1 live; or it has made it, and has m-1 in its copy until the window of m+1 opens; or an exception has left
that update, and the copy is whole. So every live rank gives m-1. Those that have come to the door of m give
m, too, but for such an exception: once everyone has come there, m is saved as with the barrier.

A training loop whose ranks do not depend on each other like this may have no such step; the reason says so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from adaptor.control.messages import BoardRecord, GroupOrder, Layout, Phase, Share


@dataclass(frozen=True)
class Plan:
    """Save `step`; one order for each group, sorted by its name."""

    step: int
    groups: tuple[GroupOrder, ...]


@dataclass(frozen=True)
class NoPlan:
    """No step has a live holder of every shard; `reason` says which shard is missing."""

    reason: str


# More steps in a row than anyone skips. Ranks are at most one step apart, so the newest are enough.
_SKIPPED = 1000

Shares = Mapping[int, Iterable[Share]]


def shares_of(layouts: Mapping[int, Layout], groups: Collection[str] | None = None) -> Shares:
    """What each rank holds, of some groups or of all."""
    if groups is None:
        return {rank: layout.shares for rank, layout in layouts.items()}
    return {
        rank: tuple(share for share in layout.shares if share.group in groups)
        for rank, layout in layouts.items()
    }


def plan(
    shares: Shares,
    alive: Mapping[int, BoardRecord],
    only: int | None = None,
    avoid: Collection[int] = (),
) -> Plan | NoPlan:
    """The largest step of which every shard of every group has a live holder.

    A step that nobody has begun is taken only where there is no other: who is let through to it leaves the
    one before, which others may be at, and one more death could leave no step at all.

    Args:
        shares: what each rank of the job holds, the dead ones included.
        alive: the boards of the ranks that can still give their state.
        only: consider this step alone.
        avoid: ranks that are chosen only for what nobody else can give.
    """
    possible = _owners(shares)
    if not possible:
        return NoPlan("no rank has told what it holds")
    writers = _writers(shares)
    steps = {s for board in alive.values() for s in _steps(board)} if only is None else {only}
    for step in sorted(steps, key=lambda step: (may_have_begun(step, alive.values()), step), reverse=True):
        there = {rank for rank, board in alive.items() if board.provides(step)}
        able = {shard: [rank for rank in owners if rank in there] for shard, owners in possible.items()}
        chosen = {shard: _first(ranks, avoid) for shard, ranks in able.items()}
        if None in chosen.values():
            continue
        holders = _holders({shard: rank for shard, rank in chosen.items() if rank is not None})
        able_to_write = {group: [rank for rank in ranks if rank in there] for group, ranks in writers.items()}
        if all(able_to_write.values()):
            return Plan(
                step,
                tuple(
                    GroupOrder(group, ranks, _writer(ranks, able_to_write[group], avoid))
                    for group, ranks in holders.items()
                ),
            )
    return NoPlan(_missing(possible, writers, alive))


def _first(ranks: list[int], avoid: Collection[int]) -> int | None:
    """The lowest of `ranks`, which are in order; one of `avoid` only where there is no other."""
    return next((rank for rank in ranks if rank not in avoid), ranks[0] if ranks else None)


def _owners(shares: Shares) -> dict[Share, list[int]]:
    owners: dict[Share, list[int]] = {}
    seen: set[tuple[str, int]] = set()
    for rank in sorted(shares):
        for share in shares[rank]:
            if (share.group, share.count) not in seen:
                seen.add((share.group, share.count))
                for index in range(share.count):
                    owners[Share(share.group, index, share.count)] = []
            own = Share(share.group, share.index, share.count) if share.foreign else share
            owners.setdefault(own, []).append(rank)
    return owners


def _writers(shares: Shares) -> dict[str, list[int]]:
    writers: dict[str, list[int]] = {}
    for rank in sorted(shares):
        for share in shares[rank]:
            ranks = writers.setdefault(share.group, [])
            if not share.foreign and rank not in ranks[-1:]:
                ranks.append(rank)
    return writers


def _steps(board: BoardRecord) -> list[int]:
    newest = range(max(board.oldest, board.finished - _SKIPPED), board.finished + 1)
    return [s for s in (*newest, board.ahead) if board.provides(s)]


def may_have_begun(step: int, boards: Collection[BoardRecord]) -> bool:
    """Whether somebody, alive or dead, may have begun `step`: not where a live rank was not READY for it."""
    for board in boards:
        if step <= board.finished or (board.phase == Phase.UPDATING and step == board.ahead):
            return True
    alive = (Phase.RUNNING, Phase.UNREADABLE)  # READY is ahead
    return not any(board.phase in alive and board.ahead < step for board in boards)


def _holders(chosen: Mapping[Share, int]) -> dict[str, tuple[int, ...]]:
    groups: dict[str, list[int]] = {}
    for shard in sorted(chosen, key=lambda s: (s.group, s.index)):
        groups.setdefault(shard.group, []).append(chosen[shard])
    return {group: tuple(ranks) for group, ranks in groups.items()}


def _writer(holders: Collection[int], able: list[int], avoid: Collection[int]) -> int:
    """One who takes part anyway, if there is one."""
    present = frozenset(holders)  # of thousands of ranks hundreds may hold shards of a group
    return min(able, key=lambda rank: (rank in avoid, rank not in present, rank))


def _missing(
    possible: Mapping[Share, list[int]], writers: Mapping[str, list[int]], alive: Mapping[int, BoardRecord]
) -> str:
    for shard, owners in sorted(possible.items(), key=lambda item: (item[0].group, item[0].index)):
        if not any(rank in alive and _steps(alive[rank]) for rank in owners):
            ranks = " and ".join(str(rank) for rank in owners) or "nobody"
            return (
                f"shard {shard.index} of {shard.count} of group {shard.group} has no live holder, "
                f"it was on rank {ranks}"
            )
    for group, able in sorted(writers.items()):
        if not any(rank in alive and _steps(alive[rank]) for rank in able):
            return f"nobody is left who can write group {group}, that was rank {' and '.join(map(str, able))}"
    return "every shard has a live holder, but there is no step that all of them hold"
