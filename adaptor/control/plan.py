"""Which step to save, and who gives which shard: a pure function of boards and layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from adaptor.control.messages import BoardRecord, GroupOrder, Share


@dataclass(frozen=True)
class Plan:
    """Save `step`; one order for each group, sorted by its name."""

    step: int
    groups: tuple[GroupOrder, ...]


@dataclass(frozen=True)
class NoPlan:
    """No step has a live holder of every shard; `reason` says which shard is missing."""

    reason: str


Shares = Mapping[int, Iterable[Share]]


def plan(
    shares: Shares,
    alive: Mapping[int, BoardRecord],
    only: int | None = None,
    avoid: Collection[int] = (),
) -> Plan | NoPlan:
    """The largest step of which every shard of every group has a live holder.

    Args:
        shares: what each rank of the job holds, the dead ones included.
        alive: the boards of the ranks that can still give their state.
        only: consider this step alone.
        avoid: ranks that are chosen only for what nobody else can give.
    """
    possible = _owners(shares)
    if not possible:
        return NoPlan("no rank has told what it holds")
    steps = {s for board in alive.values() for s in _steps(board)} if only is None else {only}
    for step in sorted(steps, reverse=True):
        able = {
            shard: [rank for rank in owners if rank in alive and alive[rank].provides(step)]
            for shard, owners in possible.items()
        }
        chosen = {
            shard: min(ranks, key=lambda rank: (rank in avoid, rank), default=None)
            for shard, ranks in able.items()
        }
        if None not in chosen.values():
            return Plan(step, _orders({shard: rank for shard, rank in chosen.items() if rank is not None}))
    return NoPlan(_missing(possible, alive))


def _owners(shares: Shares) -> dict[Share, list[int]]:
    owners: dict[Share, list[int]] = {}
    for rank in sorted(shares):
        for share in shares[rank]:
            for index in range(share.count):
                owners.setdefault(Share(share.group, index, share.count), [])
            owners[share].append(rank)
    return owners


def _steps(board: BoardRecord) -> list[int]:
    return [s for s in (*range(board.oldest, board.finished + 1), board.ahead) if board.provides(s)]


def _orders(chosen: Mapping[Share, int]) -> tuple[GroupOrder, ...]:
    groups: dict[str, list[int]] = {}
    for shard in sorted(chosen, key=lambda s: (s.group, s.index)):
        groups.setdefault(shard.group, []).append(chosen[shard])
    return tuple(GroupOrder(name, tuple(ranks), min(ranks)) for name, ranks in groups.items())


def _missing(possible: Mapping[Share, list[int]], alive: Mapping[int, BoardRecord]) -> str:
    for shard, owners in sorted(possible.items(), key=lambda item: (item[0].group, item[0].index)):
        if not any(rank in alive and _steps(alive[rank]) for rank in owners):
            ranks = " and ".join(str(rank) for rank in owners) or "nobody"
            return (
                f"shard {shard.index} of {shard.count} of group {shard.group} has no live holder, "
                f"it was on rank {ranks}"
            )
    return "every shard has a live holder, but there is no step that all of them hold"
