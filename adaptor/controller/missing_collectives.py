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
    groups = sorted({group for found in of_ranks.values() for group in found})
    found = [one for group in groups if (one := _compare(group, of_ranks)) is not None]
    waiting = {rank for one in found for rank in one.others if _is_last(one.group, of_ranks[rank])}
    causes = [one for one in found if not waiting.issuperset(one.ranks)]
    lines = [one.words for one in causes or found]
    if of_ranks and (unknown := [rank for rank in silent if rank not in of_ranks]):
        who = ranks_in_words(
            unknown,
            "does not answer: what it has begun is not known, and others may wait for it",
            "do not answer: what they have begun is not known, and others may wait for them",
            most=_NAMED,
        )
        lines.insert(0, who)
    return lines[:MOST_LINES]


class _Difference(NamedTuple):
    group: str
    ranks: list[int]  # which are missed
    others: list[int]
    words: str


def _compare(group: str, of_ranks: Mapping[int, Collectives]) -> _Difference | None:
    here = {rank: found[group] for rank, found in sorted(of_ranks.items()) if group in found}
    most = max(one.number for one in here.values())
    ahead = {rank: one for rank, one in here.items() if one.number == most}
    names = Counter(one.name for one in ahead.values())
    name = names.most_common(1)[0][0]
    behind = [rank for rank in here if rank not in ahead]
    if behind:
        words = (
            f"{ranks_in_words(behind, 'misses', 'miss', most=_NAMED)} {name} {most} of {group},"
            f" which {ranks_in_words(ahead, 'has begun', 'have begun', most=_NAMED)}"
        )
        return _Difference(group, behind, list(ahead), words)
    if len(names) > 1:
        apart = [rank for rank, one in ahead.items() if one.name != name]
        same = [rank for rank in ahead if rank not in apart]
        called = ", ".join(sorted({ahead[rank].name for rank in apart}))
        words = (
            f"{ranks_in_words(apart, 'has begun', 'have begun', most=_NAMED)} {called} as collective {most}"
            f" of {group}, {ranks_in_words(same, most=_NAMED)} {name}"
        )
        return _Difference(group, apart, same, words)
    return None


def _is_last(group: str, found: Collectives) -> bool:
    return found[group].begun == max(one.begun for one in found.values())
