"""When the workers of a node have stood still for too long; pure, the time comes in as an argument.

Invariant: nothing is said unless every worker is in the middle of a step, and has ended some before, so not
during start-up, compilation, evaluation, a save, or at the end of the script.
"""

from __future__ import annotations

from collections.abc import Iterable

from adaptor.control.messages import BoardRecord, Phase

# A step may take so many times as long as the longest of the recent ones.
FACTOR = 3.0
# Whoever has not looked for so long was stopped or starved itself, and the workers may have been with it.
ABSENT_S = 10.0


class Stillness:
    """Watches boards.

    Args:
        floor_s: no shorter time is too long; 0: no time is.
    """

    def __init__(self, floor_s: float) -> None:
        self._floor_s = floor_s
        self._seen: dict[int, tuple[int, ...]] = {}
        self._since = 0.0
        self._looked = float("-inf")

    def look(self, boards: Iterable[BoardRecord], now: float, *, traced: bool = False) -> float | None:
        """Seconds for which all of them have stood still, where that is too long; else None.

        Args:
            now: monotonic seconds.
            traced: a debugger, or a compiler, has one of them.
        """
        boards = list(boards)
        seen = {board.rank: _position(board) for board in boards}
        if seen != self._seen or traced or now - self._looked > ABSENT_S:
            self._seen, self._since = seen, now
        self._looked = now
        if not self._floor_s or not boards or not all(map(_is_training, boards)):
            return None
        still = now - self._since
        limit = max(self._floor_s, FACTOR * max(board.slowest for board in boards))
        return still if still >= limit else None


def _position(board: BoardRecord) -> tuple[int, ...]:
    return board.phase, board.finished, board.ahead, board.inside, board.progress


def _is_training(board: BoardRecord) -> bool:
    in_a_step = board.phase in (Phase.RUNNING, Phase.READY, Phase.UPDATING) and board.inside >= 0
    return in_a_step and board.slowest > 0
