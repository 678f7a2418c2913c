"""The update window: the part of a step in which the inner optimizers of a rank change the state.

Invariants: the window opens only when no rank needs this rank any more for its update, and the door lets the
step pass; the board says at every moment which state of the rank is intact. After a verified step the
window opens only when every rank knows that all holders agree (`verifier`). If collectives of a step were
aborted on the device, its gradients may be wrong: the step is void, and counts neither as READY nor as
skipped nor as left out (`void`). The check runs after the last collective of the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from adaptor.devices.device import Device
from adaptor.errors import StepError, UnsupportedError
from adaptor.protocol.board import Board
from adaptor.protocol.messages import Phase
from adaptor.protocol.state_provider import StepVerifier, Trainee
from adaptor.worker.abort_collectives import CollectiveEndedError
from adaptor.worker.door import MOVE, Door, Unwind

# The longest wait, in seconds, for the device's copy of a record: a collective that never ends may be queued
# before it.
RECORD_S = 2.0


class TakenRecord(NamedTuple):
    """A record, and the device's event after which the tensors are complete; None: complete already."""

    record: Any
    mark: Any


@dataclass(frozen=True)
class _Content:
    """The content of the history.

    Attributes:
        records: by finished step.
        snapshot_step: the newest step that was updated or skipped.
        snapshot: the changes of the step before its update.
        updated: whether the step was updated; False: the step was skipped.
    """

    records: dict[int, TakenRecord] = field(default_factory=dict)
    snapshot_step: int = -1
    snapshot: Any = None
    updated: bool = True


class StepHistory:
    """The records of the last steps of one training: each step's state besides tensors, for a dump.

    The main thread adds records, the processor's threads read them: the content is a single value, always
    replaced as a whole. `reset` begins another training.
    """

    def __init__(self) -> None:
        self._content = _Content()

    @property
    def snapshot_step(self) -> int:
        """Return the newest step that was updated or skipped; -1: none."""
        return self._content.snapshot_step

    def reset(self, records: Mapping[int, TakenRecord] | None = None) -> None:
        """Forget all but `records`, by finished step."""
        self._content = _Content(dict(records or {}))

    def add(self, records: Mapping[int, TakenRecord], oldest: int, newest: int) -> None:
        """Add `records`, by finished step, and drop the records of steps no longer needed.

        Args:
            oldest, newest: the finished steps savable from this rank.
        """
        content = self._content
        # Keep the record of the step before the newest snapshot, too: the newest record derives from it.
        oldest = min(oldest, content.snapshot_step - 1)
        newest = max(newest, content.snapshot_step - 1)
        kept = {step: taken for step, taken in content.records.items() if oldest <= step <= newest}
        self._content = _Content(
            {**kept, **records}, content.snapshot_step, content.snapshot, content.updated
        )

    def add_snapshot(self, step: int, snapshot: Any, updated: bool) -> None:
        """Add the `snapshot` of the changes in `step` before its update, or of a skipped step."""
        self._content = _Content(self._content.records, step, snapshot, updated)

    def require_as_derived(self, step: int, record: Any, trainee: Trainee) -> None:
        """Compare the taken `record` of `step` with the record that an earlier dump would have had.

        Raises:
            StepError: the script has not moved its scheduler as it has said.
        """
        content = self._content
        if content.snapshot_step == step and (record_before := content.records.get(step - 1)) is not None:
            derived = trainee.derive(record_before.record, content.snapshot, content.updated)
            trainee.require_as_derived(record, derived)

    def record_of(self, step: int, trainee: Trainee) -> Any:
        """Return the record of `step`: everything besides tensors. Raises LookupError."""
        content = self._content
        taken, record_before = content.records.get(step), content.records.get(step - 1)
        if taken is not None and trainee.device.done(taken.mark):
            return taken.record
        # Not taken yet, or queued behind a collective that never ends; the snapshot was taken before that.
        if content.snapshot_step == step and record_before is not None:
            return trainee.derive(record_before.record, content.snapshot, content.updated)
        if taken is not None and trainee.device.wait(taken.mark, RECORD_S):
            return taken.record
        raise LookupError(f"step {step} is not among the steps that this rank still knows")


class UpdateWindow:
    """The update windows of one rank; opened and closed by the main thread.

    Args:
        report_broken_barrier: tells the agent that the barrier broke, with the error.

    Attributes:
        door: the entrance of each window.
        history: the step history, which receives the changes of a step before its update.
        verifier: compares the holders of the state before an update; None: no step is verified.
    """

    def __init__(self, board: Board, report_broken_barrier: Callable[[str], None]) -> None:
        self.door = Door()
        self.history = StepHistory()
        self.verifier: StepVerifier | None = None
        self._board = board
        self._report_broken_barrier = report_broken_barrier
        self._mark: Any = None  # after the last update on the device, and the last local copy
        self._inner: frozenset[int] = frozenset()
        self._waiting: set[int] = set()  # inner optimizers that have yet to finish this update
        self.is_copying = False
        self._newest: int | None = None  # the newest step whose collectives nobody has ended

    @property
    def is_open(self) -> bool:
        """Return True while some inner optimizers have not made this update yet."""
        return bool(self._waiting)

    @property
    def inner_count(self) -> int:
        """Return how many inner optimizers make an update; 0 on a rank that trains nothing."""
        return len(self._inner)

    @property
    def waits_for(self) -> int:
        """Return how many inner optimizers have not made this update yet."""
        return len(self._waiting)

    def owns(self, optimizer: object) -> bool:
        """Return True if the updates of this optimizer belong to a step."""
        return id(optimizer) in self._inner

    def has_all(self, optimizers: Iterable[object]) -> bool:
        """Return True if the optimizers include all inner optimizers, of which at least one exists."""
        return bool(self._inner) and self._inner <= {id(optimizer) for optimizer in optimizers}

    def begin(self, trainee: Trainee, inner_optimizers: Iterable[object]) -> None:
        """Begin with an intact state: the next windows belong to these inner optimizers."""
        self._inner = frozenset(id(optimizer) for optimizer in inner_optimizers)
        self._waiting = set()
        self.is_copying = False
        self._newest = None
        self._mark = trainee.device.mark()

    def begin_copy(self, trainee: Trainee, step: int) -> None:
        """Note that a script begins to make the local copy of the state before `step` by itself."""
        self._come_to_the_door(trainee, step)
        self._board.copying()
        self.is_copying = True

    def open(self, trainee: Trainee, step: int) -> None:
        """Open the window of `step`, until `updated` was called for each inner optimizer.

        Raises:
            Unwind: the main thread is to leave the framework's loop instead.
        """
        self._enter(trainee, step)
        self._waiting = set(self._inner)

    def updated(self, trainee: Trainee, optimizer: object) -> bool:
        """Note that an inner optimizer has changed its state; return whether it was the last."""
        if self._waiting == {id(optimizer)}:
            trainee.update_replicas()
            self._mark = trainee.device.mark()
        self._waiting.discard(id(optimizer))
        return not self._waiting

    def close(self, step: int) -> None:
        """Close the window: the state is that of `step`."""
        self._board.finish(step)
        self.door.leave()

    @contextlib.contextmanager
    def moving(self, device: Device) -> Iterator[None]:
        """Let the state move to other memory, but not while an incident is open.

        Raises:
            Unwind: the main thread is to leave the framework's loop instead.
        """
        self.door.enter(MOVE)
        try:
            yield
        finally:
            self._mark = device.mark()
            self.door.leave()

    def skip(self, trainee: Trainee, step: int) -> None:
        """Note that `step` makes no update."""
        self.require_whole(step)
        self._take_snapshot(trainee, step, updated=False)
        self._mark = trainee.device.mark()
        if trainee.has_state():
            self._board.finish(step)

    def void(self, newest: int) -> None:
        """Let no step after `newest` count: its collectives are ended on the device; from any thread."""
        self._newest = newest if self._newest is None else min(newest, self._newest)

    def require_whole(self, step: int) -> None:
        """Check that `step` may count; on the main thread, after the last collective of the step.

        Raises:
            Unwind: the main thread is to leave the framework's loop instead.
            CollectiveEndedError: the step's collectives were ended.
        """
        self.door.require_not_turned_away()
        if self._newest is not None and step > self._newest:
            raise CollectiveEndedError

    def give_up(self) -> None:
        """Note that an exception has left the script or the step.

        Inside the window the live state belongs to no step. At the door the live state is intact, but the
        main thread will not come back to go through.
        """
        if self.is_copying:  # the live state is intact
            self.is_copying = False
            self._board.turn_back()
            self.door.leave()
        elif self._waiting:
            self._waiting = set()
            self._board.broken()
            self.door.leave()
        elif self._board.phase is Phase.READY:
            self._board.turn_back()

    def was_bypassed(self, step: int) -> None:
        """Note that inner optimizers changed the state on the way to `step`, not all of them here."""
        self.give_up()
        self._board.changed(step)

    def wait_for_device(self, device: Device, until: float) -> bool:
        """Wait for the device, which may be behind the main thread; return whether the device's updates are
        over.

        Args:
            until: the end of waiting, on the monotonic clock.
        """
        return device.wait(self._mark, max(0.0, until - time.monotonic()))

    def _enter(self, trainee: Trainee, step: int) -> None:
        if not self.is_copying:
            self._come_to_the_door(trainee, step)
            if trainee.has_local_copy:
                self._copy_state(trainee)
        else:
            self._mark = trainee.device.mark()
        self.is_copying = False
        self._board.updating(copied=trainee.has_local_copy)

    def _come_to_the_door(self, trainee: Trainee, step: int) -> None:
        trainee.exchange()  # a rank whose exchange breaks has not come to the door
        # Before READY: a rank that is READY knows that the holders agree, so the step may be finished.
        if self.verifier is not None and not self.verifier.is_equal(trainee, step):
            self._leave(step)
        self._take_snapshot(trainee, step, updated=True)
        self.require_whole(step)
        self._board.ready(step)
        if not trainee.has_local_copy:
            self._wait_at_the_barrier(trainee)
        try:
            self.door.enter(step)
        except Unwind:
            self._board.turn_back()
            raise

    def require_equal(self, trainee: Trainee, step: int) -> None:
        """Compare the holders before a save of `step`, which is finished; collective.

        Raises:
            Unwind: the holders differ; the main thread is to leave the framework's loop.
            RuntimeError: a rank is gone.
        """
        if self.verifier is not None and not self.verifier.is_equal(trainee, step, is_saved=True):
            self._leave(step + 1)

    def _leave(self, step: int) -> None:
        """Wait until the main thread is turned away: no rank makes the update of `step`, which never counts.

        Raises:
            Unwind: the main thread is to leave the framework's loop.
            CollectiveEndedError: the door was opened.
        """
        self.void(step - 1)
        self.door.shut()
        self.door.enter(step)  # no rank is READY for the step, so the controller lets nobody pass
        self.door.leave()
        self.require_whole(step)

    def _wait_at_the_barrier(self, trainee: Trainee) -> None:
        try:
            # Behind a closed door this rank may have reported not to be READY yet. Then nobody may begin
            # the update, so the barrier must not be passed.
            if not self.door.closed:
                trainee.barrier()
        except Exception as error:  # a broken barrier counts as READY: the gradients are complete here
            self.door.shut()
            self._report_broken_barrier(f"{type(error).__name__}: {error}")

    def _copy_state(self, trainee: Trainee) -> None:
        """Make the local copy, inside the window: meanwhile only the live state is intact."""
        self._board.copying()
        try:
            trainee.copy_state()
            self._mark = trainee.device.mark()
        except BaseException:
            self._board.turn_back()
            self.door.leave()
            raise

    def _take_snapshot(self, trainee: Trainee, step: int, *, updated: bool) -> None:
        self.history.add_snapshot(step, trainee.snapshot_before_update(), updated)


def require_next(step: int, last: int, finished: int) -> None:
    """Check the number of a new step.

    A step that was begun, and left without an update, may be begun again.

    Args:
        last: the step begun before; -1: none, since training began or a fault was recovered online.
        finished: the newest finished step.

    Raises:
        StepError: another step was expected; nothing is saved under the wrong number.
    """
    if last < 0:
        if step != finished + 1:
            raise StepError(
                f"step {step} was begun, expected step {finished + 1}: "
                f"adaptor.protect was told step={finished}, the step of the checkpoint that was loaded, or 0;"
                " begin with the step after it"
            )
    elif step != last + 1 and not (step == last and finished < step):
        raise StepError(
            f"step {step} was begun, expected step {last + 1}: the step before was "
            f"{last}, and what is saved has the number of its step"
        )


def require_first_update(step: int, finished: int) -> None:
    """Check that `step` has not been updated yet; `finished`: the newest finished step. Raises StepError."""
    if finished >= step:
        raise StepError(
            f"step {step} has a second update of its optimizer, expected "
            f"step {step + 1} to be begun before it: what is saved has the number of its step"
        )


def part_of_an_update(step: int, missing: int, optimizers: int) -> StepError:
    """Return the error of a step that ended before `missing` of its `optimizers` made an update."""
    return StepError(
        f"step {step} has ended, and {missing} of {optimizers} optimizers that adaptor.protect "
        "was given made no update in it: what is saved is the state after the updates of all; "
        "let each make one in every step"
    )


def update_without_hooks(step: int, kinds: str) -> UnsupportedError:
    """Return the error of an update in `step` by optimizers of these `kinds` without a report from a hook."""
    return UnsupportedError(
        f"step {step} has an update of {kinds} that no hook has told of, so it could not be saved: train "
        "with what get_megatron_optimizer returned, and leave its optimizers, their `step` and their hooks "
        "as they are; or set ENABLE_TTP=False"
    )
