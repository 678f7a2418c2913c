"""The invariants of each step of each rank, checked whenever a rank writes its board.

These are the invariants of docs/protocol.md about a step: the barrier, the exchange and update of a mirror,
the local copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptor.protocol.board import Board
from adaptor.protocol.messages import Phase

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

# Phases in which the live state is whole: no update is in flight or was interrupted.
_WHOLE = (Phase.RUNNING, Phase.READY, Phase.ENDED)


class StepInvariants:
    """The step invariants of one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._broken: list[str] = []

    def always(self) -> None:
        """Fail with the findings of `board`, whose caller may catch exceptions as a script does."""
        assert not self._broken, self._broken

    def board(self, worker: Worker) -> None:
        """Check the board that `worker` has just written."""
        board = worker.session.board
        if not worker.session.door.closed:  # otherwise the controller decides
            if board.phase is Phase.UPDATING:
                self._all_come_first(worker, board)
            if board.phase is Phase.READY:
                self._all_have_finished_the_step_before(board)
        if board.live >= 0:
            self._state_is_what_it_says(worker, board)

    def _all_come_first(self, worker: Worker, board: Board) -> None:
        """Check the barrier: a rank begins an update by itself only when all ranks have their gradients."""
        if self._world.job.has_local_copy:
            return
        late_ranks = [rank for rank, ahead in self._boards("ahead").items() if ahead < board.ahead]
        self._require(
            not late_ranks,
            f"rank {worker.rank} begins the update of step {board.ahead} before ranks {late_ranks} are READY",
        )

    def _all_have_finished_the_step_before(self, board: Board) -> None:
        """Check that survivors have a common step with local copies, where there is no barrier."""
        previous = self._world.job.tensors(board.ahead - 1)
        late_ranks = [rank for rank, finished in self._boards("finished").items() if finished < previous]
        self._require(
            not late_ranks,
            f"a rank is READY for step {board.ahead} before ranks {late_ranks} have made {previous}",
        )

    def _state_is_what_it_says(self, worker: Worker, board: Board) -> None:
        """Check that a rank's shards and mirror are of one step, and its local copy of the previous step."""
        job, trainee = self._world.job, worker.trainee
        if board.phase in _WHOLE and board.live <= board.finished:  # otherwise the live state is given up
            steps = {trainee.tensors[share.group, share.index] for share in trainee.shares}
            self._require(
                steps == {job.tensors(board.live)},
                f"rank {worker.rank} says that it has step {board.live}, its shards are of {steps}",
            )
        if board.oldest < board.live:
            steps = {trainee.before[share.group, share.index] for share in trainee.shares}
            self._require(
                steps == {job.tensors(board.oldest)},
                f"rank {worker.rank} says that it has a copy of step {board.oldest}, it is of {steps}",
            )

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._broken.append(otherwise)

    def _boards(self, field: str) -> dict[int, int]:
        """Return a field of each rank's board, also of dead ranks.

        The board of a newcomer counts only after the recovery. A rank that is cut off does not know of a
        newcomer, and its door may be open.
        """
        workers = self._world.workers
        return {
            rank: getattr(agent.boards.read(rank), field)
            for agent in self._world.agents.values()
            for rank in agent.ranks
            if workers[rank].agent is agent and not workers[rank].newcomer
        }
