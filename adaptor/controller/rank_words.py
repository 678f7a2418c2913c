"""Writes ranks and what they do, in words; pure."""

from __future__ import annotations

from collections.abc import Iterable


def ranks_in_words(
    ranks: Iterable[int], singular_verb: str = "", several: str = "", *, most_named: int
) -> str:
    """Return ranks and what they do, like `rank 1 waits` and `ranks 1, 2 and 5 more wait`.

    Args:
        ranks: at least one.
        singular_verb: what is said of one rank.
        several: the same of several.
        most_named: how many of them are named; the rest is a number.
    """
    named_ranks = [str(rank) for rank in ranks]
    if len(named_ranks) == 1:
        return f"rank {named_ranks[0]} {singular_verb}".rstrip()
    named, last = named_ranks[:-1], named_ranks[-1]
    if len(named_ranks) > most_named:
        named, last = named_ranks[:most_named], f"{len(named_ranks) - most_named} more"
    return f"ranks {', '.join(named)} and {last} {several}".rstrip()
