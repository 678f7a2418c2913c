"""Who is asked to freeze, and who has; pure, without a clock.

A step is chosen only when every live rank has told where it stands, or has run out of time. Where training
has only just begun, what ranks hold may still be on its way, or lost with their node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from adaptor.control.messages import BoardRecord, Layout, Phase
from adaptor.control.plan import may_have_begun

# A process that dies closes its connections before its parent learns of it: freeing some GB takes a second.
EXPLANATION_S = 2.0


class Freezing:
    """Of one incident.

    Args:
        nodes: of the ranks that are alive; the owner takes out what is gone.
        layouts: what ranks have told that they hold.
        unbegun: ranks that ended before training had begun on them, so that no step has finished.
        awaited: nodes that may yet come to a controller that has taken the place of another.
        gone: the last boards of ranks that have ended.
        took_over: every agent that is there has told all that it knows.
        answer_s: how long a rank has for its answer.

    boards  of those that have answered
    silent  did not close their doors in time
    """

    def __init__(
        self,
        nodes: dict[int, int],
        layouts: Mapping[int, Layout],
        world_size: int,
        unbegun: Collection[int],
        awaited: Collection[int],
        gone: Mapping[int, BoardRecord],
        took_over: bool,
        opened_at: float,
        answer_s: float,
    ) -> None:
        self._nodes = nodes
        self._layouts = layouts
        self._world_size = world_size
        self._unbegun = unbegun
        self._awaited = awaited
        self._gone = gone
        self._took_over = took_over
        self._opened_at = opened_at
        self._answers_by = opened_at + answer_s
        self._explained_by = 0.0  # layouts are waited for
        self.boards: dict[int, BoardRecord] = {}
        self._newest = -1
        self.silent: list[int] = []

    @property
    def knows_all(self) -> bool:
        """Whether every rank of the job has told what it holds."""
        return len(self._layouts) == self._world_size

    @property
    def waits(self) -> bool:
        """Whether nobody has been asked yet, because layouts are waited for."""
        return self._explained_by > 0

    @property
    def never_begun(self) -> bool:
        """Whether training had not begun on somebody, and nobody may come who knows better."""
        if self._awaited:
            return False
        if self._unbegun or not self._layouts:
            return True
        return self._took_over and not self._nodes.keys() <= self._layouts.keys()

    @property
    def unknown(self) -> list[int]:
        """The ranks that have not told what they hold."""
        return [rank for rank in range(self._world_size) if rank not in self._layouts]

    @property
    def is_over(self) -> bool:
        return not self.waits and not self._awaited and self._nodes.keys() <= self.boards.keys()

    def wait(self) -> None:
        """For the layouts of all: an exception may be the echo of a death of which word is on its way."""
        self._explained_by = self._opened_at + EXPLANATION_S

    def ask(self) -> None:
        self._explained_by = 0.0

    def hurry(self, until: float) -> None:
        """Answers are waited for until then at the latest."""
        self._answers_by = min(self._answers_by, until)

    def is_late(self, now: float) -> bool:
        """Whether layouts have been waited for long enough."""
        return self.waits and now >= self._explained_by

    def hear(self, rank: int, board: BoardRecord) -> None:
        self.boards[rank] = board
        self._newest = max(self._newest, _newest(board))

    def forget(self, rank: int) -> None:
        self.boards.pop(rank, None)

    def lose_patience(self, now: float) -> bool:
        """Whether time for answers is over: who has not answered is no holder."""
        if now < self._answers_by:
            return False
        silent = [rank for rank in self._nodes if rank not in self.boards]
        self.silent += silent
        for rank in silent:
            del self._nodes[rank]
        return True

    def further(self, step: int) -> str:
        """What is to be said where `step` is saved, and somebody has finished a later one, or left one.

        Ranks of a job with local copies may have gone back; and who was further may be dead by now.
        """
        finished = max([self._newest, *map(_newest, self.boards.values())])
        return "" if finished <= step else f"step {finished} was not finished on every rank"

    @property
    def newest_told(self) -> int:
        """The newest step that anyone had finished or left by the boards as they were told, without one that
        anyone has been let through to since; those of the dead included."""
        return max([self._newest, *map(_newest, self._gone.values())])

    @property
    def newest_begun(self) -> int:
        """The newest step that anyone may have begun: where all are at its door, one that is gone, too."""
        boards = [*self.boards.values(), *self._gone.values()]
        ahead = max((board.ahead for board in boards), default=-1)
        return max(self.newest_told, ahead if may_have_begun(ahead, boards) else -1)

    def let_through(self, ranks: Iterable[int], step: int) -> None:
        """They go through the door to `step`, if they have not; without a copy there is no way back."""
        for rank in ranks:
            board = self.boards[rank]
            if board.finished < step:
                oldest = board.finished if self._layouts[rank].goes_back else step
                self.boards[rank] = msgspec.structs.replace(
                    board, phase=Phase.RUNNING, oldest=oldest, finished=step
                )


def _newest(board: BoardRecord) -> int:
    return board.ahead if board.phase == Phase.BROKEN else board.finished
