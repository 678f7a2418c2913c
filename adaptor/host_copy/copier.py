"""Makes the host copies of a worker beside its steps, and with TTP_HOST_COPY=auto chooses the steps between.

A thread copies the state of a finished step beside the next step. The copied state does not change between
two updates. The main thread waits for the rest of a copy only before its next update. The rank has two files,
and all ranks agree on the file to write next: when a copy is due, the ranks exchange the newest sure step of
each rank: whole, and on a job of several nodes kept by another node, too. With TTP_HOST_COPY=auto the ranks
also agree on the number of steps until the next copy.

Invariant: no rank overwrites the newest step that is sure on all ranks. Therefore every rank has a whole copy
of a common step at any time after the first copy. While the newest copies are on their way to other nodes no
new ones are made. A rank that cannot copy reports the failure, and keeps its copies.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from adaptor import context, output, text
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.errors import UnsupportedError
from adaptor.host_copy import content
from adaptor.host_copy.content import CopyAbandonedError
from adaptor.protocol.copy_file import FILES, CopyFile, CopyHeader
from adaptor.protocol.environment import Generation, HeldCopies, WorkerPlace
from adaptor.replica import group, tolerance
from adaptor.worker.session import Session

# The step of a rank that holds no copy.
NONE = -1
# A copy that is queued behind a collective that never ends is given up after so many seconds.
DEVICE_S = 60.0
# With TTP_HOST_COPY=auto: the part of the training's time that copies take at most, even if each holds the
# training up for as long as it takes. `tolerance.MOST_STEPS` goes before it.
_SHARE_OF_TIME = 0.02


def attach(session: Session, on_whole: Callable[[int], None]) -> None:
    """Give `session` the copier of this rank, with the present files.

    Args:
        on_whole: is called with the step of each new copy, on the copier's thread.

    Raises:
        OSError: the agent's files cannot be opened.
        UnsupportedError: this process was started only to write copies.
    """
    require_training()
    every, place = context.get().settings.host_copy, context.part(WorkerPlace)
    paths = context.part(HeldCopies).paths.get(place.rank, ())
    if every == 0 or not paths:
        return

    def smallest(numbers: Sequence[int]) -> list[int]:
        return group.smallest(group.of_training_job(), numbers)

    session.copier = Copier(
        every,
        place.rank,
        dist.get_world_size(),
        context.part(Generation).name,
        [CopyFile(path) for path in paths[:FILES]],
        context.part(HeldCopies).has_keeper,
        on_whole,
        smallest,
    )


def require_training() -> None:
    """End this process if it was started only to write host copies; the copies are written, or cannot be
    written.

    Raises:
        UnsupportedError: the process was started only to write copies.
    """
    if context.part(HeldCopies).only:
        raise UnsupportedError("no restart is left")


class Copier:
    """The host copies of one rank; the main thread calls the object (`state_provider.StateCopier`).

    Args:
        every: a copy is made of each step divisible by the number; None: as often as `_SHARE_OF_TIME` allows.
        rank, world_size: of this process, and of the job.
        generation: the start of the workers.
        files: two, held by the agent.
        has_keeper: whether another node keeps the copies, too.
        on_whole: is called with the step of each new copy, on the copying thread.
        smallest: returns the smallest value of all ranks, number by number; collective.

    Attributes:
        sure: the newest step of which all ranks are known to have a copy; -1: none
    """

    def __init__(
        self,
        every: int | None,
        rank: int,
        world_size: int,
        generation: str,
        files: Sequence[CopyFile],
        has_keeper: bool,
        on_whole: Callable[[int], None],
        smallest: Callable[[Sequence[int]], list[int]],
    ) -> None:
        self._every = every
        self._rank = rank
        self._world_size = world_size
        self._generation = generation
        self._files = list(files)
        self._has_keeper = has_keeper
        self._on_whole = on_whole
        self._smallest = smallest
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._is_cancelled = False
        self._failed = ""  # why this rank copies no more
        self._is_told = False  # the user, of how often copies are made
        self._copy_s = 0.0  # what the newest copy has taken
        self.sure = NONE
        self._forget_pace()
        self._thread: threading.Thread | None = None

    def _forget_pace(self) -> None:
        self._due = 0  # with `auto`: the step from which on a copy is due
        self._agreed: tuple[int, float] | None = None  # the step at which ranks have agreed on that, and when

    @property
    def steps_between(self) -> int:
        """Return the most steps between two copies."""
        return tolerance.steps_between_copies(self._every)

    @property
    def is_auto(self) -> bool:
        """Return whether a job without lone shards makes no copies."""
        return self._every is None

    @property
    def count(self) -> int:
        """Return how many copies are kept."""
        return len(self._files)

    def forget_all(self) -> None:
        """Drop the copies of this rank: training begins, from a step on disk."""
        for file in self._files:
            file.clear()

    def forget_after(self, step: int) -> None:
        """Drop the copies of steps after `step`, from which the job goes on; the next copy is due."""
        self.stop()
        self._forget_pace()
        self.sure = min(self.sure, step)
        for file in self._files:
            header = file.header
            if header is not None and header.step > step:
                file.begin()

    def reserve(self, size: int) -> None:
        """Have memory for copies of `size` bytes. Raises OSError: the memory is too small."""
        for file in self._files:
            file.reserve(size)

    def copy(
        self,
        trainee: MegatronTrainee,
        record: StepRecord,
        mark: Any,
        *,
        is_intact: bool,
        kept: Callable[[], bytes] = bytes,
    ) -> None:
        """Begin the copy of a finished step if a copy is due; then collective.

        Args:
            mark: the device's, after the update of the step and the record.
            is_intact: whether the live state is the state of the step.
            kept: returns what the board keeps after the step.
        """
        if record.step < self._due or (self._every and record.step % self._every):
            return
        self.wait()
        steps_by_copy = self._held()
        newest, sure = max(steps_by_copy.values(), default=NONE), self._sure(steps_by_copy)
        wanted = self._wanted_interval(record.step)
        self.sure, oldest, latest, interval = self._smallest([sure, newest, -newest, -wanted])
        if self.sure < oldest == -latest:
            return  # every rank has the newest copy, and not every keeper
        self._agree(record.step, -interval)
        target = self._target(steps_by_copy, self.sure, record.step)
        if target is None or not is_intact or self._failed:
            return
        self._is_cancelled = False
        try:
            besides = content.take_extra(trainee), kept()
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name="ttp-host-copy", daemon=True)
                thread.start()
                self._thread = thread
        # A script may have put in something else meanwhile; and there may be no thread to be had.
        except (TypeError, RuntimeError) as error:
            self._fail(error)
            return
        with self._changed:
            self._job = lambda: self._copy(target, trainee, record, besides, mark)
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait for the end of the running copy: the state is about to change."""
        with self._changed:
            self._changed.wait_for(lambda: self._job is None)

    def stop(self) -> None:
        """Cancel the running copy, and wait for the copying thread to notice."""
        self._is_cancelled = True
        self.wait()

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps of the whole copies of this generation; from any thread."""
        return tuple(self._held().values())

    def _held(self) -> dict[int, int]:
        """Return the step of each file with a whole copy of this generation, by the file's number."""
        headers = {number: file.header for number, file in enumerate(self._files)}
        return {
            number: header.step
            for number, header in headers.items()
            if header is not None and header.generation == self._generation
        }

    def _sure(self, steps_by_copy: dict[int, int]) -> int:
        """Return the newest step that outlives this node, if a keeper is required."""
        kept = (
            step
            for number, step in steps_by_copy.items()
            if not self._has_keeper or self._files[number].kept == step
        )
        return max(kept, default=NONE)

    def _wanted_interval(self, step: int) -> int:
        """Return the wanted number of steps until the next copy, from measured times."""
        if self._agreed is None:
            return 1
        earlier_step, at = self._agreed
        step_s = (time.monotonic() - at) / (step - earlier_step)
        return min(tolerance.MOST_STEPS, max(1, math.ceil(self._copy_s / (_SHARE_OF_TIME * step_s))))

    def _agree(self, step: int, interval: int) -> None:
        """Note that the copy after the copy of `step` is due in `interval` steps."""
        if self._every is not None:
            return
        is_measured = self._agreed is not None
        self._due, self._agreed = step + interval, (step, time.monotonic())
        if is_measured and not self._is_told and self._rank == 0:
            self._is_told = True
            output.tell(
                f"[ttp] copies in host memory: one of rank 0 has taken {self._copy_s:.3g} s, so now every"
                f" {interval} steps",
                to="stdout",
            )

    def _target(self, steps_by_copy: dict[int, int], sure: int, step: int) -> CopyFile | None:
        """Return the file to overwrite with `step`; None: this rank has a copy of `step` already.

        The file with the `sure` step of all ranks is kept; of two other files the older is chosen.
        """
        if step in steps_by_copy.values():
            return None
        free = [number for number in range(len(self._files)) if steps_by_copy.get(number) != sure]
        return self._files[min(free, key=lambda number: steps_by_copy.get(number, NONE))]

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None)
                job = self._job
            assert job is not None
            try:
                job()
            except CopyAbandonedError:
                pass
            except BaseException as error:  # the training does not depend on it
                self._fail(error)
            finally:
                with self._changed:
                    self._job = None
                    self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        self._failed = text.describe(error)
        output.tell(
            f"[ttp] rank {self._rank} makes no more copies in host memory (TTP_HOST_COPY): {self._failed}"
        )

    def _copy(
        self,
        file: CopyFile,
        trainee: MegatronTrainee,
        record: StepRecord,
        besides: tuple[bytes, bytes],
        mark: Any,
    ) -> None:
        file.begin()
        if not trainee.device.wait(mark, DEVICE_S):
            raise CopyAbandonedError
        began, (extra, kept) = time.monotonic(), besides
        size = content.write(
            trainee, record, extra, lambda size: _room(file, size), lambda: self._is_cancelled, kept
        )
        digest = file.digest(size)
        if self._is_cancelled:
            raise CopyAbandonedError
        file.commit(CopyHeader(self._generation, self._world_size, self._rank, record.step, size, digest))
        self._copy_s = time.monotonic() - began
        self._on_whole(record.step)


def _room(file: CopyFile, size: int) -> memoryview:
    file.reserve(size)
    return file.content
