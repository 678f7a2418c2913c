"""The parts that optimizers of the older form add to the framework's optimizers."""

from __future__ import annotations

from typing import Any

from adaptor.mindio import job


class ReplicaOptimizer:
    """Base of a framework's optimizer whose shards have copies on other ranks: update window and dump.

    Attributes:
        current_step: the step of the optimizer state; during an update the next step
        error_dump: a dump has begun: the next save is last words
        save_args: of the dump: `step`, `rank` (the writer) and `rank_list` (the givers of shards)
    """

    current_step = 0
    error_dump = False
    save_args: dict[str, Any]

    def begin_to_update(self, iteration: int) -> None:
        """Begin the change of the state of `iteration`; return when the change may begin."""
        interface = job.get()
        interface.loaded(iteration)
        interface.reached(iteration)
        self.current_step = iteration
        self.exchange()
        if interface.has_local_copy:
            interface.start_copy()
            self.copy_state()
        interface.start_update(iteration if interface.has_local_copy else -1)
        # However the update ends, from here on the live state is not the state of `iteration`.
        self.current_step = iteration + 1

    def end_to_update(self) -> None:
        """End the change of the state. Does not return while the job saves."""
        self.update_copies()
        job.get().end_update(self.current_step)

    def exchange(self) -> None:
        """Fetch the parts of this update for copies of other ranks' shards; after an exception the state is
        intact.
        """

    def update_copies(self) -> None:
        """Update this rank's copies of others' shards, without communication."""

    def copy_state(self) -> None:
        """Copy the state that an update changes; a dump of an earlier step reads the copy."""
        raise NotImplementedError

    def givers(self) -> list[int]:
        """Return, for each shard of a dump, its giver among `rank_list`."""
        (replicas,) = job.get().replicas
        return replicas.givers(self.save_args["rank_list"])

    def set_dump_args(self, rank: int, step: int, rank_list: list[int]) -> None:
        """Prepare a dump of `step`: `rank` writes, the ranks of `rank_list` give shards."""
        self.save_args = {"step": step, "rank": rank, "rank_list": rank_list}
        self.error_dump = True
