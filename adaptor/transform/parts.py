"""Finds the parts of a whole tensor that one rank of another layout is made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from adaptor.transform.rules import Cut
from adaptor.transform.source import Part


@dataclass(frozen=True)
class _Run:
    """A stretch of a rank's part along the axis that is cut: where it begins there and in the whole."""

    local: int
    whole: int
    length: int


def _runs(cut: Cut, whole: int, rank: int, size: int) -> list[_Run]:
    """Return the stretches that tensor rank `rank` of `size` has of an axis of length `whole`."""
    each = whole // cut.pieces // size
    return [
        _Run(piece * each, piece * (whole // cut.pieces) + rank * each, each) for piece in range(cut.pieces)
    ]


def one_of_each(cut: Cut, parts: Sequence[Part]) -> list[Part]:
    """Return one part for each tensor rank, the first alone of what is not cut."""
    if cut.axis is None:
        return list(parts[:1])
    found = {part.rank.tp: part for part in reversed(parts)}
    return [found[rank] for rank in sorted(found)]


def needed(
    cut: Cut, shape: tuple[int, ...], rank: int, size: int, parts: Sequence[Part]
) -> Iterator[tuple[Part, int, int, int]]:
    """Yield what tensor rank `rank` of `size` needs: a part, where in it, where in its own tensor, how long.

    Args:
        shape: of the rank's tensor.
        parts: of all ranks of the source, each tensor rank once.
    """
    if cut.axis is None:
        yield parts[0], 0, 0, shape[0] if shape else 1
        return
    own = _runs(cut, shape[cut.axis] * size, rank, size)
    for part in parts:
        whole = part.stored.shape[cut.axis] * len(parts)
        for theirs in _runs(cut, whole, part.rank.tp, len(parts)):
            for mine in own:
                begin = max(mine.whole, theirs.whole)
                end = min(mine.whole + mine.length, theirs.whole + theirs.length)
                if begin < end:
                    yield (
                        part,
                        begin - theirs.whole + theirs.local,
                        begin - mine.whole + mine.local,
                        end - begin,
                    )
