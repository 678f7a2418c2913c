"""Regular saves that fail while all training state is intact (TTP_FAILED_SAVE): training goes on, and the
save is tried again after a pause.

A save is collective, so a rank that left the save alone, by an exception, would leave the other ranks in a
collective. Invariant: a rank notes its error and continues the save; at each barrier of the save all ranks
compare, and if a rank has an error, all ranks leave the save together, by `SaveFailedError`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from adaptor import output, text
from adaptor.context import Context
from adaptor.errors import CheckpointError
from adaptor.protocol.messages import SaveEnded
from adaptor.worker import runtime
from adaptor.worker.origin import may_be_an_echo

if TYPE_CHECKING:
    import torch.distributed as dist

# The pause before a failed save is tried again between two intervals; it doubles with each failure.
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 600.0
_MOST_CAUSES = 8  # of an error; causes may be chained in a circle


class SaveFailedError(CheckpointError):
    """A regular save has failed; every rank raises the error, in the same call of the save."""


class SaveAgreement:
    """The agreement of all ranks whether a regular save has failed."""

    def __init__(self, everyone: dist.ProcessGroup, folder: Path) -> None:
        self.everyone = everyone
        self._folder = folder
        self.error = ""

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error of the block, and continue; an error that may follow from a lost rank is raised."""
        try:
            yield
        except Exception as error:
            if may_be_an_echo(error):
                raise
            self.error = self.error or _reason(error, self._folder)

    def meet(self) -> None:
        """Wait for all ranks, and compare. Collective.

        Raises:
            SaveFailedError: a rank has noted an error; on all ranks.
            RuntimeError: a rank is gone.
        """
        import torch.distributed as dist

        from adaptor.replica import group

        rank, size = dist.get_rank(self.everyone), dist.get_world_size(self.everyone)
        (first,) = group.smallest(self.everyone, [rank if self.error else size])
        if first == size:
            return
        reason = [self.error]
        dist.broadcast_object_list(reason, src=first, group=self.everyone)
        raise SaveFailedError(f"rank {first}: {reason[0]}")


class FailedSaves:
    """The consecutive failed saves of this process; equal on all ranks.

    Args:
        clock: returns seconds; the clock of rank 0 decides.
    """

    def __init__(self, context: Context, clock: Callable[[], float] = time.monotonic) -> None:
        self._continues = context.settings.failed_save == "continue"
        self._clock = clock
        self._loop_runs = False
        self._count = 0
        self._step = -1
        self._reason = ""
        self._due = 0.0

    @contextlib.contextmanager
    def in_loop(self) -> Iterator[None]:
        """Mark a block in which a training loop goes on after a failed save; the loop ends by its return, or
        by an exit.

        Raises:
            CheckpointError: the save of the last step has failed; on all ranks.
        """
        self._loop_runs, exit_of_script = True, None
        try:
            yield
        except SystemExit as error:
            exit_of_script = error
        finally:
            self._loop_runs = False
        self.require_saved(runtime.get().session.board.finished)
        if exit_of_script is not None:
            raise exit_of_script

    def agreement(self, folder: Path) -> SaveAgreement | None:
        """Return the agreement for a save that begins now; None: an error of the save is raised unchanged.

        None applies outside of `in_loop`, where there is no training to continue, and in other threads of a
        script.
        """
        from adaptor.replica import group

        worker, everyone = runtime.get(), group.of_this_job()
        may_fail = self._continues and self._loop_runs
        if not may_fail or everyone is None or not isinstance(worker, runtime.Runtime):
            return None
        return SaveAgreement(everyone, folder) if worker.session.trains_on_this_thread else None

    def fail(self, step: int, reason: str, unfinished: str) -> None:
        """Note on all ranks that the save of `step` has failed; rank 0 prints the failure.

        Args:
            reason: the error, with its rank.
            unfinished: the unfinished folder, if not removable; else empty.
        """
        self._count += 1
        self._step, self._reason = step, reason
        pause_s = self._pause()
        stays = f"; {unfinished} is unfinished and could not be removed" if unfinished else ""
        self._tell(
            SaveEnded(runtime.get().rank, step, text.encodable(reason)),
            f"step {step} could not be saved: {reason}{stays}; training goes on, and the state stays in the"
            f" memory of the ranks; the save is tried again in {pause_s:g} s, and at each --save-interval",
        )

    def succeed(self, step: int) -> None:
        """Note on all ranks that the save of `step` is complete; after a failure rank 0 prints it."""
        times = f"{self._count} save{'' if self._count == 1 else 's'} had failed before"
        line = f"step {step} is saved; {times}" if self._count else ""
        self.forget()
        self._tell(SaveEnded(runtime.get().rank, step), line)

    def succeed_after_training(self, step: int) -> None:
        """Note that the save of `step` after the framework's training loop is complete.

        In the loop `succeed` notes the save, on all ranks in the same call: the ranks compare failures after
        a step.
        """
        if self._count and not self._loop_runs:
            self.succeed(step)

    def forget(self) -> None:
        """Forget the failures, so that new processes agree with this process on the next saves."""
        self._count, self._step = 0, -1

    def is_due(self) -> bool:
        """Return whether a failed save is tried again after this step. Collective after a failure."""
        from adaptor.replica import group

        everyone = group.of_this_job()
        if not self._count or everyone is None:
            return False
        is_waiting = runtime.get().rank != 0 or self._clock() < self._due
        (all_wait,) = group.smallest(everyone, [int(is_waiting)])
        if not all_wait:
            self._pause()  # an asynchronous save takes its time, too
        return not all_wait

    def _pause(self) -> float:
        """Begin the pause before the next attempt; return its seconds."""
        pause_s: float = min(FIRST_PAUSE_S * 2 ** (self._count - 1), LONGEST_PAUSE_S)
        self._due = self._clock() + pause_s
        return pause_s

    def require_saved(self, step: int) -> None:
        """Require that the save of `step`, after which training ends, has not failed.

        Raises:
            CheckpointError: the save has failed; on all ranks.
        """
        if self._count and self._step == step:
            raise CheckpointError(f"training ends, and step {step} could not be saved: {self._reason}")

    def _tell(self, message: SaveEnded, line: str) -> None:
        worker = runtime.get()
        if worker.rank == 0 and isinstance(worker, runtime.Runtime):
            if line:
                output.tell(f"[ttp] {line}")
            worker.processor.say(message)


def _reason(error: BaseException, folder: Path) -> str:
    """Return the operating system's first error behind `error`, with its path; else the innermost cause."""
    for _ in range(_MOST_CAUSES):
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror} ({error.filename or folder})"
        failures = getattr(error, "failures", None)  # of torch's CheckpointException, by rank
        if isinstance(failures, dict) and failures:
            error = next(iter(failures.values()))[0]
        elif (cause := error.__cause__ or error.__context__) is not None and text.say(cause):
            error = cause
        else:
            break
    return text.describe(error)
