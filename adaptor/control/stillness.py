"""When the workers of a node have stood still for too long; pure, the time comes in as an argument.

A job hangs when every node says so, and nobody can be at something that takes its time: start-up,
compilation, evaluation, a save. Who is between two steps may be at one of these, unless another rank is
still in the middle of a step that this one has finished: then it waits for that rank. Who has come to the end
of its script does nothing any more.

Invariant: a hang is only where some rank is in the middle of a step, and every other rank is in one as well,
waits for one that is, or has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from adaptor.control.messages import BoardRecord, Moving, Phase, Still

# A step may take so many times as long as the longest of the recent ones.
FACTOR = 3.0
# Whoever has not looked for so long was stopped or starved itself, and the workers may have been with it.
ABSENT_S = 10.0
# It is said again, for a controller that has taken over, when it has lasted by such a part longer: the nodes
# of a large job that evaluates for an hour should not all say so all the time.
AGAIN = 1 / 16


class Stillness:
    """Watches the boards of a node.

    Args:
        floor_s: no shorter time is too long; 0: no time is.
    """

    def __init__(self, node: int, floor_s: float) -> None:
        self._node = node
        self._floor_s = floor_s
        self._seen: dict[int, tuple[int, ...]] = {}
        self._since = 0.0
        self._looked = float("-inf")
        self._said: Still | None = None

    def look(
        self, boards: Iterable[BoardRecord], now: float, *, traced: bool = False
    ) -> Still | Moving | None:
        """What is to be said to the controller now.

        Args:
            now: monotonic seconds.
            traced: a debugger, or a compiler, has one of them.
        """
        there = self._still(list(boards), now, traced)
        said, self._said = self._said, there
        if there is None:
            return Moving(self._node) if said is not None else None
        if said is not None and there.seconds < said.seconds * (1 + AGAIN):
            self._said = said
            return None
        return there

    def _still(self, boards: list[BoardRecord], now: float, traced: bool) -> Still | None:
        seen = {board.rank: _position(board) for board in boards}
        if seen != self._seen or traced or now - self._looked > ABSENT_S:
            self._seen, self._since = seen, now
        self._looked = now
        going = [board for board in boards if board.phase != Phase.ENDED]
        if not self._floor_s or not all(map(_is_training, going)):
            return None
        seconds = now - self._since
        if seconds < max(self._floor_s, FACTOR * max((board.slowest for board in going), default=0.0)):
            return None
        inside = [board.inside for board in going if board.inside >= 0]
        between = [board.finished for board in going if board.inside < 0]
        return Still(self._node, seconds, min(inside, default=-1), min(between, default=-1))


def hang(nodes: Iterable[Still]) -> bool:
    """Whether a job hangs, all nodes of which say this."""
    nodes = list(nodes)
    inside = [still.inside for still in nodes if still.inside >= 0]
    between = [still.between for still in nodes if still.between >= 0]
    return bool(inside) and min(inside) <= min(between, default=min(inside))


def _position(board: BoardRecord) -> tuple[int, ...]:
    return board.phase, board.finished, board.ahead, board.inside, board.progress


def _is_training(board: BoardRecord) -> bool:
    return board.phase in (Phase.RUNNING, Phase.READY, Phase.UPDATING) and board.slowest > 0
