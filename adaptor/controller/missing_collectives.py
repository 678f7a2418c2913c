"""Finds which rank misses which collective, from what torch's flight recorder has of each rank; pure.

A rank begins the collectives of a group in the same order as every other rank of that group. So whoever has
begun fewer of them than others misses one, and whoever is on the same one under another name has called
something else. Whether one has completed is not asked: gloo does not record that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from adaptor.controller.rank_words import ranks_in_words
from adaptor.protocol.collectives import Collectives

# More sentences than these are left out.
MOST_LINES = 8
# The most ranks that are named.
_NAMED = 8


def missing(of_ranks: Mapping[int, Collectives], silent: Iterable[int] = ()) -> list[str]:
    """Return which rank misses which collective, one sentence for each group, the cause before what follows.

    A rank that is missed in one group may only wait in another one: ranks that wait nowhere come first, alone
    if there are any. Ranks that do not answer, `silent`, come before all: nobody knows what they have begun.
    """
    groups = sorted({group for collectives in of_ranks.values() for group in collectives})
    differences = [difference for group in groups if (difference := _compare(group, of_ranks)) is not None]
    waiting = {
        rank
        for difference in differences
        for rank in difference.others
        if _is_last(difference.group, of_ranks[rank])
    }
    causes = [difference for difference in differences if not waiting.issuperset(difference.ranks)]
    lines = [difference.words for difference in causes or differences]
    if of_ranks and (unknown := [rank for rank in silent if rank not in of_ranks]):
        waiting_words = ranks_in_words(
            unknown,
            "does not answer: what it has begun is not known, and others may wait for it",
            "do not answer: what they have begun is not known, and others may wait for them",
            most_named=_NAMED,
        )
        lines.insert(0, waiting_words)
    return lines[:MOST_LINES]


class _Difference(NamedTuple):
    group: str
    ranks: list[int]  # which are missed
    others: list[int]
    words: str


def _compare(group: str, of_ranks: Mapping[int, Collectives]) -> _Difference | None:
    positions = {
        rank: collectives[group] for rank, collectives in sorted(of_ranks.items()) if group in collectives
    }
    highest_number = max(position.number for position in positions.values())
    ahead = {rank: position for rank, position in positions.items() if position.number == highest_number}
    names = Counter(position.name for position in ahead.values())
    name = names.most_common(1)[0][0]
    ranks_behind = [rank for rank in positions if rank not in ahead]
    if ranks_behind:
        description = (
            f"{ranks_in_words(ranks_behind, 'misses', 'miss', most_named=_NAMED)} {name} {highest_number} "
            f"of {group},"
            f" which {ranks_in_words(ahead, 'has begun', 'have begun', most_named=_NAMED)}"
        )
        return _Difference(group, ranks_behind, list(ahead), description)
    if len(names) > 1:
        apart = [rank for rank, position in ahead.items() if position.name != name]
        agreeing_ranks = [rank for rank in ahead if rank not in apart]
        called = ", ".join(sorted({ahead[rank].name for rank in apart}))
        description = (
            f"{ranks_in_words(apart, 'has begun', 'have begun', most_named=_NAMED)} {called} as collective "
            f"{highest_number}"
            f" of {group}, {ranks_in_words(agreeing_ranks, most_named=_NAMED)} {name}"
        )
        return _Difference(group, apart, agreeing_ranks, description)
    return None


def _is_last(group: str, collectives: Collectives) -> bool:
    return collectives[group].begun == max(position.begun for position in collectives.values())
