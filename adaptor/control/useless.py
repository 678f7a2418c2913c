"""Who is alive and gives nothing, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from adaptor.control.messages import BoardRecord, Phase


def do_not_answer(ranks: Iterable[int]) -> str:
    return "".join(f"; rank {rank} is alive, but does not answer" for rank in sorted(ranks))


def cannot_be_read(boards: Mapping[int, BoardRecord]) -> str:
    return "".join(
        f"; rank {rank} is alive, but its device cannot be read: {board.error}"
        for rank, board in boards.items()
        if board.phase == Phase.UNREADABLE
    )
