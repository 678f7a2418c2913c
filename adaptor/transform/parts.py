"""Finds the parts of a whole tensor that one rank of another layout is made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adaptor.checkpoint.layout_file import Piece
from adaptor.transform.model import Slot
from adaptor.transform.source import StoredPart


def one_of_each(slot: Slot, parts: Sequence[StoredPart]) -> list[StoredPart]:
    """Return one part for each place in the whole tensor, the first alone of what is not cut."""
    axis = slot.item.cut.axis
    if axis is None:
        return list(parts[:1])
    distinct_parts = {pieces_of(axis, part.pieces, part.stored.shape): part for part in reversed(parts)}
    return [distinct_parts[pieces] for pieces in sorted(distinct_parts, key=lambda pieces: pieces[0].whole)]


def pieces_of(axis: int, pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return the `pieces` of a rank's tensor of this `shape` along `axis`: one where it has the whole."""
    return pieces or (Piece(0, 0, shape[axis]),)


def needed(slot: Slot, parts: Sequence[StoredPart]) -> Iterator[tuple[StoredPart, int, int, int]]:
    """Yield what a rank needs for its tensor: a part, where in it, where in its own tensor, how long.

    Args:
        slot: of the rank.
        parts: of the source, each place once (`one_of_each`).
    """
    axis = slot.item.cut.axis
    if axis is None:
        yield parts[0], 0, 0, slot.shape[0] if slot.shape else 1
        return
    own_pieces = pieces_of(axis, slot.pieces, slot.shape)
    for part in parts:
        for theirs in pieces_of(axis, part.pieces, part.stored.shape):
            for own_piece in own_pieces:
                begin = max(own_piece.whole, theirs.whole)
                end = min(own_piece.whole + own_piece.length, theirs.whole + theirs.length)
                if begin < end:
                    yield (
                        part,
                        begin - theirs.whole + theirs.here,
                        begin - own_piece.whole + own_piece.here,
                        end - begin,
                    )
