"""The session: a worker's knowledge of its training, which it writes to its board.

The main thread calls `begin_training`, then in every step `begin_step`, `before_update` and `after_update`
(from the optimizer's own step hooks) and `end_update`. The processor's threads call the rest. Between them
stand the door and the history of steps (`step_history`); no lock is held across a call into
the framework.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from adaptor.devices.device import HOST, Device
from adaptor.diagnostics.recorder import Recorder
from adaptor.errors import StepError
from adaptor.protocol.board import Board
from adaptor.protocol.messages import BoardRecord, Phase
from adaptor.protocol.state_provider import Trainee
from adaptor.worker.door import PUBLISH, Door, Unwind
from adaptor.worker.loop_position import LoopPosition
from adaptor.worker.pace import Measures, Pace
from adaptor.worker.step_history import StepHistory, Taken


class Session:
    """The session of a worker process; there is one."""

    def __init__(
        self,
        board: Board,
        say: Callable[[Trainee, int], None],
        broke: Callable[[str], None],
        protected: Callable[[Trainee, int], None] = lambda trainee, step: None,
        recorder: Recorder | None = None,
    ) -> None:
        """Make the session.

        Args:
            board: of this rank.
            say: tells the agent which shards this rank holds, and from which step training goes on.
            broke: tells the agent that the barrier broke.
            protected: is called once, at the first finished step.
            recorder: is told of each step.
        """
        self.board = board
        self._recorder = recorder
        self.door = Door()
        self.trainee: Trainee | None = None
        self._say = say
        self._broke = broke
        self._protected = protected
        self._history = StepHistory()
        self._mark: Any = None  # behind the last update on the device, and the last local copy
        self._last_believed: BoardRecord | None = None
        self._step = -1
        self._waiting: set[int] = set()  # inner optimizers that have yet to finish this update
        self._copying = False
        self._inner: frozenset[int] = frozenset()
        self._origin = -1  # the step that training goes on from
        self._is_protected = False
        self.is_training = False
        self._ends_with_update = False
        self._end_is_told = True
        self._thread = 0  # the one that trains
        self._pace = Pace(board)
        self._loop = LoopPosition()

    @property
    def updating(self) -> bool:
        """Return True while some inner optimizers have not made this update yet."""
        return bool(self._waiting)

    @property
    def counts_steps(self) -> bool:
        """Return whether a step has begun since training began."""
        return self._step >= 0

    @property
    def has_finished_a_step(self) -> bool:
        """Return whether a step has finished that was not done when training began."""
        return self.trainee is not None and self.board.finished > self._origin

    @property
    def may_have_finished_a_step(self) -> bool:
        """Return True if some rank may have finished a step: all ranks were READY for its update."""
        return self.has_finished_a_step or (self.trainee is not None and self.board.ahead > self._origin)

    def owns(self, optimizer: object) -> bool:
        """Return True if the updates of this optimizer belong to a step."""
        return id(optimizer) in self._inner

    # main thread

    def begin_training(self, trainee: Trainee, inner_optimizers: Iterable[object], origin: int) -> None:
        """Begin training.

        Args:
            trainee: the training state.
            inner_optimizers: the optimizers whose updates make a step.
            origin: the step that the state belongs to, and from which training goes on.
        """
        self._leave_earlier_step()
        self._thread = threading.get_ident()
        self._inner = frozenset(id(optimizer) for optimizer in inner_optimizers)
        self._history.restart()
        self._mark = trainee.device.mark()
        self.trainee = trainee
        self._step = -1
        self._origin = origin
        self._is_protected = False
        self.is_training = True
        self._pace.begin()
        self.board.start(origin)
        self._say(trainee, origin)

    def go_back(self, step: int) -> None:
        """Give up what was finished after `step`, before the live state is overwritten with the local copy.

        From now on nobody is told of a later step, or given its state; that of `step` is the local copy.
        """
        self._last_believed = None
        self.board.go_back(step)

    def begin_again(
        self,
        trainee: Trainee,
        inner_optimizers: Iterable[object],
        record: Any,
        step: int,
        origin: int,
        measures: Measures | None = None,
    ) -> None:
        """The state of `trainee` is that of `step` again, and `record` belongs to it: the next step is made,
        for the first time or once more.

        In a process that takes the place of another training begins here; `origin` is the step that the job
        was started from, and `measures` those of another rank.
        """
        self._thread = threading.get_ident()
        self._inner = frozenset(id(optimizer) for optimizer in inner_optimizers)
        self._waiting = set()
        self._copying = False
        self._last_believed = None
        self._step = -1
        self._mark = trainee.device.mark()
        self._history.restart({step: Taken(record, None)})
        comes_new = self.trainee is None
        self.trainee = trainee
        self.board.start(step)
        if comes_new:
            self._origin = origin
            self._is_protected = True  # the process before has said so
            self.is_training = True
            self._pace.begin()
            if measures is not None:
                self._pace.take_over(measures)
            self._say(trainee, origin)

    def end_training(self) -> None:
        """End training: the loop is over, and what follows may take any time."""
        self.end_step()
        self.is_training = False
        self._pace.rest()
        if self._recorder is not None:
            self._recorder.close()

    def require_next(self, step: int) -> None:
        """Check the number of the next step, in a loop that numbers its steps by itself.

        A step that was begun, and left without an update, may be begun again.

        Raises:
            StepError: another step was expected; nothing is saved under the wrong number.
        """
        if self.trainee is None:
            return
        if self._step < 0:
            if step != self._origin + 1:
                raise StepError(
                    f"step {step} was begun, expected step {self._origin + 1}: "
                    f"adaptor.protect was told step={self._origin}; give it the step of the checkpoint that "
                    "was loaded, or 0"
                )
        elif step != self._step + 1 and not (step == self._step and self.board.finished < step):
            raise StepError(
                f"step {step} was begun, expected step {self._step + 1}: the step before was "
                f"{self._step}, and what is saved has the number of its step"
            )

    def begin_step(
        self,
        step: int,
        *,
        watched: bool = False,
        ends_with_update: bool = False,
        updates_finish: bool = False,
    ) -> None:
        """Begin `step`; everything of step - 1 is done.

        Args:
            watched: `end_step` will be called, so that a step that does not end is noticed.
            ends_with_update: nobody has to call it: what comes after the framework's optimizer step may take
                any time.
            updates_finish: a step that its optimizer neither updated nor skipped is not finished, because it
                may have added to gradients, which no checkpoint has. Else the framework has left it out.
        """
        if self.trainee is None:
            return
        self.give_up()  # an earlier step that an exception left inside its update, and the script caught it
        self._thread = threading.get_ident()
        self._report_protection_once()
        finished, records = self.board.finished, dict[int, Taken]()
        left_out = not updates_finish and finished < step - 1 and self.trainee.has_state()
        if left_out and finished == self._history.snapshot_step:
            records[finished] = Taken(self.record_of(finished), None)
        records[step - 1] = Taken(self.trainee.take_record(step - 1), self.trainee.device.mark())
        self._history.add(records, oldest=self.board.oldest, newest=finished)
        self._step = step
        if left_out:  # the framework skipped steps as a whole (Megatron's --iterations-to-skip)
            self.board.finish(step - 1)
        if ends_with_update and 0 <= self.board.inside <= self.board.finished:
            self._end_is_told = False  # by an optimizer of the framework that does not tell
            self._pace.end_step()
        self._ends_with_update = ends_with_update
        if self._recorder is not None:
            self._recorder.begin_step(step)
        if ends_with_update:
            self._loop.begin()
        if watched or (ends_with_update and self._end_is_told):
            self._pace.begin_step(step)

    @contextlib.contextmanager
    def step(self, step: int, *, updates_finish: bool = False) -> Iterator[None]:
        """Begin `step`, and end it.

        A step that is left by an exception (which the loop may catch), or before its update, has ended, but
        its duration is not used as a measure.
        """
        self.begin_step(step, watched=True, updates_finish=updates_finish)
        try:
            yield
        except BaseException:
            self._leave_earlier_step()  # what is recorded of it ends later: the exception is told first
            raise
        if updates_finish:
            self._require_whole_update()
        self.end_step()

    def end_step(self) -> None:
        """End the step that was begun; what follows until the next one may take any time.

        The duration of a step that neither made nor skipped its update, such as one that `break` has left, is
        not used as a measure.
        """
        if self._recorder is not None:
            self._recorder.end_step()
        if self.board.finished < self.board.inside:
            self._pace.abandon_step()
        else:
            self._pace.end_step()

    def _leave_earlier_step(self) -> None:
        """Leave a step that an exception may have left inside its update window."""
        self.give_up()
        self._pace.abandon_step()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the loop that takes a time of its own (evaluation, a save).

        A hang in it is noticed once a phase of the same name has ended before.
        """
        # The board tells the position of the thread that trains; a save in another thread does not count.
        if self.trainee is None or threading.get_ident() != self._thread:
            yield
            return
        self._pace.begin_phase(name)
        try:
            yield
        except BaseException:
            self._pace.end_phase(is_measure=False)
            raise
        self._pace.end_phase()

    def before_copy(self) -> None:
        """Note that a script begins to make the local copy by itself; `before_update` ends that."""
        if self.trainee is None or self._step < 0 or self._waiting or self._copying:
            return
        self._come_to_the_door(self.trainee)
        self.board.copying()
        self._copying = True

    def before_update(self, optimizer: object) -> None:
        """Note that an inner optimizer is about to change its state; the first opens the update window."""
        if self.trainee is None or self._step < 0 or self._waiting or id(optimizer) not in self._inner:
            return
        self._require_no_second_update()
        if self._recorder is not None:
            self._recorder.before_update()
        self._open_window(self.trainee)
        self._waiting = set(self._inner)

    def after_update(self, optimizer: object) -> None:
        """Note that an inner optimizer has changed its state; the last closes the update window."""
        if not self._waiting:
            return
        if self._waiting == {id(optimizer)}:
            assert self.trainee is not None
            self.trainee.update_replicas()
            self._mark = self.trainee.device.mark()
        self._waiting.discard(id(optimizer))
        if not self._waiting:
            self._close_window()

    def update_nothing(self) -> None:
        """Pass the door with the others on a rank that trains nothing (its pipeline stage is frozen)."""
        if self.trainee is None or self._step < 0 or self._inner:
            return
        self._open_window(self.trainee)
        self._close_window()

    def end_update(
        self, updated: bool, grad_norm: float | None, inner_optimizers: Iterable[object] = ()
    ) -> None:
        """Note that the framework's optimizer step has returned; without an update the step is skipped.

        Args:
            inner_optimizers: the optimizers of that call; if they belong to another optimizer than the one
                that is protected (as in a GAN), it is ignored.
        """
        if self.trainee is None or self._step < 0:
            return
        inner = list(inner_optimizers)
        if inner and not any(map(self.owns, inner)):
            return
        self.board.grad_norm = float(grad_norm or 0.0)
        if not updated and self.board.finished < self._step:
            if self._recorder is not None:
                self._recorder.before_update()
            self._take_snapshot(updated=False)
            self._mark = self.trainee.device.mark()
            if self.trainee.has_state():
                self.board.finish(self._step)
        if self._ends_with_update:
            self.end_step()
        self._report_protection_once()

    def publishing(self, act: Callable[[], None]) -> None:
        """Run `act`, which publishes a regular checkpoint, but not while an incident is open."""
        self.door.enter(PUBLISH)
        try:
            act()
        finally:
            self.door.leave()

    def give_up(self) -> None:
        """Note that an exception has left the script or the step.

        Inside the update window the live state is that of no step. At the door it is intact, but the main
        thread will not come back to go through.
        """
        if self._copying:  # the live state is intact
            self._copying = False
            self.board.turn_back()
            self.door.leave()
        elif self._waiting:
            self._waiting = set()
            self.board.broken()
            self.door.leave()
        elif self.board.phase is Phase.READY:
            self.board.turn_back()

    def hold(self) -> None:
        """Keep the main thread, and with it the process and its state, until the processor ends it."""
        threading.Event().wait()

    def _report_protection_once(self) -> None:
        if self.trainee is not None and not self._is_protected and self.has_finished_a_step:
            self._is_protected = True
            self._protected(self.trainee, self.board.finished)

    def _require_no_second_update(self) -> None:
        if self.board.finished >= self._step and not self._copying:
            raise StepError(
                f"step {self._step} has a second update of its optimizer, expected "
                f"step {self._step + 1} to be begun before it: what is saved has the number of its step"
            )

    def _require_whole_update(self) -> None:
        if self._waiting:
            left, all_of_them = len(self._waiting), len(self._inner)
            self._leave_earlier_step()
            raise StepError(
                f"step {self._step} has ended, and {left} of {all_of_them} optimizers that adaptor.protect "
                "was given made no update in it: what is saved is the state after the updates of all; "
                "let each make one in every step"
            )

    def _open_window(self, trainee: Trainee) -> None:
        if not self._copying:
            self._come_to_the_door(trainee)
            if trainee.has_local_copy:
                self._copy_state(trainee)
        else:
            self._mark = trainee.device.mark()
        self._copying = False
        self.board.updating(copied=trainee.has_local_copy)

    def _close_window(self) -> None:
        self.board.finish(self._step)
        if self._ends_with_update:
            self._loop.update()
        self.door.leave()

    def _come_to_the_door(self, trainee: Trainee) -> None:
        trainee.exchange()  # where it breaks, this rank has not come to the door
        self._take_snapshot(updated=True)
        self.board.ready(self._step)
        if not trainee.has_local_copy:
            self._wait_at_the_barrier(trainee)
        try:
            self.door.enter(self._step)
        except Unwind:
            self.board.turn_back()
            raise

    def _wait_at_the_barrier(self, trainee: Trainee) -> None:
        try:
            # Behind a closed door this rank may have told that it was not READY yet. Then nobody may begin
            # the update, so the barrier must not be passed.
            if not self.door.closed:
                trainee.barrier()
        except Exception as error:  # a broken barrier counts as READY: the gradients are complete here
            self.door.shut()
            self._broke(f"{type(error).__name__}: {error}")

    def _copy_state(self, trainee: Trainee) -> None:
        """Make the local copy, inside the window: meanwhile only the live state is intact."""
        self.board.copying()
        try:
            trainee.copy_state()
            self._mark = trainee.device.mark()
        except BaseException:
            self.board.turn_back()
            self.door.leave()
            raise

    def _take_snapshot(self, updated: bool) -> None:
        assert self.trainee is not None
        self._history.add_snapshot(self._step, self.trainee.snapshot_before_update(), updated)

    # processor's threads

    def ends_left_step(self) -> bool:
        """End the step that is open where its loop has left it, which nobody tells; return whether it has."""
        step = self.board.inside
        if not self._ends_with_update or self.board.finished >= step:
            return False
        if not self._loop.was_left(self._thread) or self.board.inside != step:
            return False
        self._pace.abandon_step()
        return True

    def freeze(self, timeout_s: float, again: bool = False) -> BoardRecord | None:
        """Close the door, and wait until no update is in flight.

        Args:
            timeout_s: seconds to wait.
            again: the order is repeated in the same incident: a dump may run, and is not disturbed.

        Returns:
            The board, or None if an update is still in flight after `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        if not (self.door.close(timeout_s) and self._updates_are_over(until)):
            return None
        board = self._last_believed or self.board.record()
        uses_script_handlers = self.trainee is not None and not self.trainee.save
        # Handlers may keep the device busy for any time, which says nothing about the update.
        why = "" if again and uses_script_handlers else self._device.unreadable(release=not again)
        # A rank that was not READY may be so by now with unknown gradients, or may have skipped a step.
        if self._device.released and board.phase is not Phase.READY:
            self._last_believed = board
        return msgspec.structs.replace(board, phase=Phase.UNREADABLE, error=why) if why else board

    def let_through(self, step: int | None) -> None:
        """Let the main thread through the door to `step` only; None: to no step."""
        self.door.let_through(step)

    def bring_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> None:
        """Wait until this rank has the state of `step`, and keeps it.

        The update of the step is over then, if one is needed, and so is that of a later step which was let
        through before.

        Raises:
            TimeoutError: the update was not done after `timeout_s`.
            RuntimeError: an exception left the update.
        """
        until = time.monotonic() + timeout_s

        def over() -> bool:
            return self.board.finished >= step or self.board.phase is not Phase.READY

        if self.board.finished < step:
            wake()  # the main thread may still hang in the barrier
        if not (self.door.wait_until(over, timeout_s) and self._updates_are_over(until)):
            raise TimeoutError(f"the update of step {step} was not done after {timeout_s:g} s")
        if self.board.finished < step:
            raise RuntimeError(f"an exception left the update of step {step}")

    def from_local_copy(self, step: int) -> bool:
        """Return True if `step`, to which this rank was brought, is in the local copy, not the live state."""
        return step < self.board.live

    def measures(self) -> Measures:
        """Return what steps and phases have taken on this rank (`Pace.measures`)."""
        return self._pace.measures()

    def record_of(self, step: int) -> Any:
        """Return what belongs to `step` besides tensors. Raises LookupError if it is not known any more."""
        assert self.trainee is not None
        return self._history.record_of(step, self.trainee)

    def _updates_are_over(self, until: float) -> bool:
        """Wait for the device, which may be behind the main thread."""
        return self._device.wait(self._mark, max(0.0, until - time.monotonic()))

    @property
    def _device(self) -> Device:
        return HOST if self.trainee is None else self.trainee.device
