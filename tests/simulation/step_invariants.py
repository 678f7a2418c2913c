"""What must hold in each step of each rank, checked whenever a rank writes its board.

These are the invariants of docs/protocol.md of what stands in a step: the barrier, the exchange and update of
a mirror, the local copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from adaptor.protocol.board import Board
from adaptor.protocol.messages import Phase

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

# The live state is whole: no update of it is in flight, none was left in the middle.
_WHOLE = (Phase.RUNNING, Phase.READY, Phase.ENDED)


class StepInvariants:
    """One world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._broken: list[str] = []

    def always(self) -> None:
        """Fail by what `board` has found: where that is called, a script catches exceptions."""
        assert not self._broken, self._broken

    def board(self, worker: Worker) -> None:
        """Check what `worker` has just written to its board."""
        board = worker.session.board
        if not worker.session.door.closed:  # else the controller decides
            if board.phase is Phase.UPDATING:
                self._all_come_first(worker, board)
            if board.phase is Phase.READY:
                self._all_have_finished_the_step_before(board)
        if board.live >= 0:
            self._state_is_what_it_says(worker, board)

    def _all_come_first(self, worker: Worker, board: Board) -> None:
        """The barrier: whoever begins an update by itself knows that every rank has its gradients for it."""
        if self._world.job.has_local_copy:
            return
        behind = [rank for rank, ahead in self._boards("ahead").items() if ahead < board.ahead]
        self._require(
            not behind,
            f"rank {worker.rank} begins the update of step {board.ahead} before ranks {behind} are READY",
        )

    def _all_have_finished_the_step_before(self, board: Board) -> None:
        """Why survivors have a step in common with local copies, where there is no barrier."""
        before = self._world.job.tensors(board.ahead - 1)
        behind = [rank for rank, finished in self._boards("finished").items() if finished < before]
        self._require(
            not behind, f"a rank is READY for step {board.ahead} before ranks {behind} have made {before}"
        )

    def _state_is_what_it_says(self, worker: Worker, board: Board) -> None:
        """A rank's own shards and its mirror are of one step, and the local copy is of the step before."""
        job, trainee = self._world.job, worker.trainee
        if board.phase in _WHOLE and board.live <= board.finished:  # else the live state is given up
            found = {trainee.tensors[share.group, share.index] for share in trainee.shares}
            self._require(
                found == {job.tensors(board.live)},
                f"rank {worker.rank} says that it has step {board.live}, its shards are of {found}",
            )
        if board.oldest < board.live:
            found = {trainee.before[share.group, share.index] for share in trainee.shares}
            self._require(
                found == {job.tensors(board.oldest)},
                f"rank {worker.rank} says that it has a copy of step {board.oldest}, it is of {found}",
            )

    def _require(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._broken.append(otherwise)

    def _boards(self, field: str) -> dict[int, int]:
        """Return a field of each rank's board; those of the dead are there, too.

        That of a newcomer says nothing of its rank until all go on. A rank that is cut off knows of no
        newcomer, and its door may be open.
        """
        workers = self._world.workers
        return {
            rank: getattr(agent.boards.read(rank), field)
            for agent in self._world.agents.values()
            for rank in agent.ranks
            if workers[rank].agent is agent and not workers[rank].newcomer
        }
