"""The parts that the older form's optimizers add to the framework's."""

from __future__ import annotations

from typing import Any

from adaptor.mindio import job


class ReplicaOptimizer:
    """Base of a framework's optimizer whose shards have copies on other ranks: update window and dump.

    Attributes:
        current_step: the step that the optimizer state is that of, or that it is on its way to in an update
        error_dump: a dump has begun: what is saved now is last words
        save_args: of the dump: `step`, `rank` (who writes) and `rank_list` (who gives shards)
    """

    current_step = 0
    error_dump = False
    save_args: dict[str, Any]

    def begin_to_update(self, iteration: int) -> None:
        """The state, which is that of `iteration`, is about to change; returns when it may."""
        interface = job.get()
        interface.loaded(iteration)
        interface.reached(iteration)
        self.current_step = iteration
        self.exchange()
        if interface.has_local_copy:
            interface.start_copy()
            self.copy_state()
        interface.start_update(iteration if interface.has_local_copy else -1)
        # However the update ends: from here on the live state is not that of `iteration`.
        self.current_step = iteration + 1

    def end_to_update(self) -> None:
        """The state has changed. Does not return while the job saves."""
        self.update_copies()
        job.get().end_update(self.current_step)

    def exchange(self) -> None:
        """Fetch what copies of other ranks' shards need of this update; the state is intact if it raises."""

    def update_copies(self) -> None:
        """Update the copies that this rank has of others' shards, which needs nobody else."""

    def copy_state(self) -> None:
        """Put what an update changes into the local copy, which a dump of an earlier step takes."""
        raise NotImplementedError

    def givers(self) -> list[int]:
        """Return, for each shard of a dump, the rank of `rank_list` that gives it."""
        (replicas,) = job.get().replicas
        return replicas.givers(self.save_args["rank_list"])

    def set_dump_args(self, rank: int, step: int, rank_list: list[int]) -> None:
        """Prepare a dump of `step`: `rank` writes, the ranks of `rank_list` give shards."""
        self.save_args = {"step": step, "rank": rank, "rank_list": rank_list}
        self.error_dump = True
