"""Writes ranks and what they do, in words; pure."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_in_words(ranks: Iterable[int], one: str = "", several: str = "", *, most: int) -> str:
    """Return ranks and what they do, like `rank 1 waits` and `ranks 1, 2 and 5 more wait`.

    Args:
        ranks: at least one.
        one: what is said of one rank.
        several: the same of several.
        most: how many of them are named; the rest is a number.
    """
    found = [str(rank) for rank in ranks]
    if len(found) == 1:
        return f"rank {found[0]} {one}".rstrip()
    named, last = found[:-1], found[-1]
    if len(found) > most:
        named, last = found[:most], f"{len(found) - most} more"
    return f"ranks {', '.join(named)} and {last} {several}".rstrip()
