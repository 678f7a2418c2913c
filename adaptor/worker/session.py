"""The session: a worker's knowledge of its training, written to the worker's board.

The main thread calls `begin_training`, then in every step `begin_step`, `before_update` and `after_update`
(from the optimizer's own step hooks) and `end_update`. The processor's threads call the rest, and the freezer
(`freezer`). Between the two stand the door, through which the update window (`update_window`) is entered, and
the history of steps; no lock is held across a call into the framework.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from adaptor.hooks import WorkerHooks
from adaptor.protocol.board import Board
from adaptor.protocol.state_provider import StateCopier, Trainee
from adaptor.worker import update_window
from adaptor.worker.door import PUBLISH
from adaptor.worker.freezer import Freezer
from adaptor.worker.pace import Measures, Pace
from adaptor.worker.stacks import LoopPosition
from adaptor.worker.update_window import TakenRecord, UpdateWindow


class Session:
    """The session of a worker process; a process has a single session."""

    def __init__(
        self,
        board: Board,
        send_layout: Callable[[Trainee, int], None],
        report_broken_barrier: Callable[[str], None],
        on_protected: Callable[[Trainee, int], None] = lambda trainee, step: None,
        hooks: Sequence[WorkerHooks] = (),
        window: UpdateWindow | None = None,
    ) -> None:
        """Make the session.

        Args:
            send_layout: tells the agent this rank's shards and the step from which training goes on.
            report_broken_barrier: tells the agent that the barrier broke.
            on_protected: is called once, at the first finished step.
            hooks: of optional parts; they are told of each step.
            window: another than ours, where something else than the door stops a rank.
        """
        self.board = board
        self._hooks = hooks
        self.window = window or UpdateWindow(board, report_broken_barrier)
        self.door = self.window.door
        self.script_may_end = threading.Event()  # although an incident is open: its state is not needed
        self.freezer = Freezer(board, self.window)
        self.trainee: Trainee | None = None
        self._send_layout = send_layout
        self._on_protected = on_protected
        self._history = self.window.history
        self._step = -1
        self._origin = -1  # the step from which training goes on
        self._is_protected = False
        self.is_training = False
        self._ends_with_update = False
        self._end_is_told = True
        self._thread = 0  # the training thread
        self.pace = Pace(board)
        self._loop = LoopPosition()
        self.copier: StateCopier | None = None  # of copies in host memory
        self.drill: Callable[[int], None] = lambda step: None  # after each step, on all ranks

    @property
    def counts_steps(self) -> bool:
        """Return whether a step has begun since training began."""
        return self._step >= 0

    @property
    def trains_on_this_thread(self) -> bool:
        """Return whether the calling thread trains, and training has not ended."""
        return self.is_training and threading.get_ident() == self._thread

    @property
    def is_on_this_thread(self) -> bool:
        """Return whether the calling thread trains, or has trained."""
        return threading.get_ident() == self._thread

    @property
    def has_finished_a_step(self) -> bool:
        """Return whether a step has finished that was not done when training began."""
        return self.trainee is not None and self.board.finished > self._origin

    @property
    def may_have_finished_a_step(self) -> bool:
        """Return True if some rank may have finished a step: this rank was READY, so others may be ahead."""
        return self.has_finished_a_step or (self.trainee is not None and self.board.ahead > self._origin)

    # main thread

    def begin_training(self, trainee: Trainee, inner_optimizers: Iterable[object], origin: int) -> None:
        """Begin training.

        Args:
            inner_optimizers: the optimizers whose updates make a step.
            origin: the step of the state, from which training goes on.
        """
        self._leave_earlier_step()
        self._thread = threading.get_ident()
        self._history.reset()
        self._hold_state(trainee, inner_optimizers)
        self._origin = origin
        self._is_protected = False
        self.is_training = True
        self.pace.begin()
        self.board.start(origin)
        self._send_layout(trainee, origin)

    def begin_again(
        self,
        trainee: Trainee,
        inner_optimizers: Iterable[object],
        record: Any,
        step: int,
        origin: int,
        measures: Measures | None = None,
    ) -> None:
        """The state of `trainee` is again the state of `step`, with the matching `record`: the next step is
        made, for the first time or once more. Until `pace.abandon_step` a rank that waits for another rank
        counts as being in the next step, so a hang is noticed.

        In a replacement process training begins here; `origin` is the step from which the job was started,
        and `measures` are the measures of another rank.
        """
        self._thread = threading.get_ident()
        if self.copier is not None:
            self.copier.forget_after(step)
        self._history.reset({step: TakenRecord(record, None)})
        comes_new = self.trainee is None
        self._hold_state(trainee, inner_optimizers, restored=step)
        self.board.start(step)
        if comes_new:
            self._origin = origin
            self._is_protected = True  # the process before has said so
            self.is_training = True
            self.pace.begin()
            if measures is not None:
                self.pace.take_over(measures)
            self._send_layout(trainee, origin)
        self.pace.await_step(step + 1)

    def tell_again(self) -> None:
        """Report this rank's shards once more: the way of recovery was decided after training began."""
        assert self.trainee is not None
        self._send_layout(self.trainee, self._origin)

    def _hold_state(
        self, trainee: Trainee, inner_optimizers: Iterable[object], restored: int | None = None
    ) -> None:
        """Let the next step begin with the state of `trainee`, which is whole."""
        self.trainee = trainee
        self._step = -1
        if self.window.verifier is not None:
            self.window.verifier.begin(trainee, restored)
        self.window.begin(trainee, inner_optimizers)
        self.freezer.begin(trainee)

    def end_training(self) -> None:
        """End training: the loop is over, and what follows may take any time."""
        self.end_step()
        self.is_training = False
        self.pace.rest()
        for hook in self._hooks:
            hook.close()

    def require_next(self, step: int) -> None:
        """Check the number of the next step, in a loop that numbers steps by itself. Raises StepError."""
        if self.trainee is not None:
            update_window.require_next(step, self._step, self.board.finished)

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
            watched: `end_step` will be called, so a step without an end is noticed.
            ends_with_update: no call ends the step: work after the framework's optimizer step may take any
                time.
            updates_finish: a step that its optimizer neither updated nor skipped is not finished, because the
                step may have added to gradients, which no checkpoint contains. False: the framework has left
                the step out.
        """
        if self.trainee is None:
            return
        self.window.give_up()  # the script may have caught an exception from inside an update
        self._thread = threading.get_ident()
        self._report_protection_once()
        finished, records = self.board.finished, dict[int, TakenRecord]()
        left_out = not updates_finish and finished < step - 1 and self.trainee.has_state()
        if left_out and finished == self._history.snapshot_step:
            records[finished] = TakenRecord(self.record_of(finished), None)
        taken = records[step - 1] = TakenRecord(
            self.trainee.take_record(step - 1), self.trainee.device.mark()
        )
        self._history.add(records, oldest=self.board.oldest, newest=finished)
        if updates_finish:  # a loop of the user's own; the adapter of a framework knows its increment
            self._history.require_as_derived(step - 1, taken.record, self.trainee)
        self._step = step
        if left_out:  # the framework skipped steps as a whole (Megatron's --iterations-to-skip)
            self.window.require_whole(step - 1)
            self.board.finish(step - 1)
        if ends_with_update and 0 <= self.board.inside <= self.board.finished:
            self._end_is_told = False  # by an optimizer of the framework without a report
            self.pace.end_step()
        self._ends_with_update = ends_with_update
        for hook in self._hooks:
            hook.begin_step(step)
        if ends_with_update:
            self._loop.begin()
        if watched or (ends_with_update and self._end_is_told):
            self.pace.begin_step(step)
        if self.window.verifier is not None:
            self.window.verifier.begin_step(self.trainee)
        if self.copier is not None and step - 1 > self._origin:
            is_intact = self.board.live <= step - 1 == self.board.finished
            kept = self.board.read_kept
            self.copier.copy(self.trainee, taken.record, taken.mark, is_intact=is_intact, kept=kept)
        if step - 1 > self._origin:
            self.drill(step - 1)

    @contextlib.contextmanager
    def step(self, step: int, *, updates_finish: bool = False) -> Iterator[None]:
        """Begin `step`, and end the step after the block.

        The step ends where the block is left and not with its update (`ends_with_update` of `begin_step`):
        work after the update in the block belongs to the step. `updates_finish` has the meaning of
        `begin_step`; if True, an update made by only some of the inner optimizers is an error, too.

        A step left by an exception (which the loop may catch), or before its update, has ended, but the
        duration is not used as a measure.
        """
        self.begin_step(step, watched=True, updates_finish=updates_finish)
        try:
            yield
        except BaseException:
            self._leave_earlier_step()  # the step's record ends later, after the report of the exception
            raise
        if updates_finish and self.window.is_open:
            missing = self.window.waits_for
            self._leave_earlier_step()
            raise update_window.part_of_an_update(step, missing, self.window.inner_count)
        self.end_step()

    def end_step(self) -> None:
        """End the current step; work before the next step may take any time.

        The duration of a step without a made or skipped update, for example a step left by `break`, is not
        used as a measure.
        """
        for hook in self._hooks:
            hook.end_step()
        if self.board.finished < self.board.inside:
            self.pace.abandon_step()
        else:
            self.pace.end_step()

    def _leave_earlier_step(self) -> None:
        """Leave the update window of a step that an exception may have ended."""
        self.window.give_up()
        self.pace.abandon_step()

    @contextlib.contextmanager
    def phase(self, name: str, usual_s: float = 0.0) -> Iterator[None]:
        """Mark a phase of the loop with a duration of its own (evaluation, a save).

        A hang in a phase is noticed once a phase of the same name has ended before, or from the first on if
        `usual_s` (`Pace.begin_phase`) is not 0.
        """
        # The board shows the position of the training thread; a save in another thread does not count.
        if self.trainee is None or threading.get_ident() != self._thread:
            yield
            return
        self.pace.begin_phase(name, usual_s)
        try:
            yield
            if name == "evaluation":
                self.trainee.after_evaluation()
        except BaseException:
            self.pace.end_phase(is_measure=False)
            raise
        self.pace.end_phase()

    def wait_for_data(self, read: Callable[[], Any]) -> Any:
        """Call `read`, which returns the next batch of a data loader; the time of the call is measured."""
        if self.trainee is None or threading.get_ident() != self._thread:
            return read()
        return self.pace.wait_for_data(read)

    def before_copy(self) -> None:
        """Note that a script begins to make the local copy by itself; the copy ends with `before_update`."""
        if self.trainee is None or self._step < 0 or self.window.is_open or self.window.is_copying:
            return
        self.window.begin_copy(self.trainee, self._step)

    def before_update(self, optimizer: object) -> None:
        """Note that an inner optimizer is about to change its state; the first opens the update window."""
        if self.trainee is None or self._step < 0 or self.window.is_open or not self.window.owns(optimizer):
            return
        if not self.window.is_copying:
            update_window.require_first_update(self._step, self.board.finished)
        for hook in self._hooks:
            hook.before_update()
        if self.copier is not None:
            self.copier.wait()
        self.window.open(self.trainee, self._step)

    def after_update(self, optimizer: object) -> None:
        """Note that an inner optimizer has changed its state; the last closes the update window."""
        if self.trainee is not None and self.window.is_open and self.window.updated(self.trainee, optimizer):
            self._close_window()

    def require_hooks(self, optimizer: object) -> None:
        """Check, after an update by an inner optimizer, that the optimizer's hooks have reported the update.

        Raises:
            UnsupportedError: the hooks have not.
        """
        if self._step >= 0 and not self.window.is_open and self.board.finished < self._step:
            self._refuse_update([optimizer])

    def _refuse_update(self, optimizers: Iterable[object]) -> NoReturn:
        """Refuse an update that has bypassed the door: other ranks may not have been ready for the update,
        and a copy of a shard has not followed.
        """
        self.window.was_bypassed(self._step)
        kinds = " and ".join(sorted({type(optimizer).__name__ for optimizer in optimizers}))
        raise update_window.update_without_hooks(self._step, kinds)

    def update_nothing(self) -> None:
        """Pass the door with the other ranks, on a rank that trains nothing (a frozen pipeline stage)."""
        if self.trainee is None or self._step < 0 or self.window.inner_count:
            return
        self.window.open(self.trainee, self._step)
        self._close_window()

    def _close_window(self) -> None:
        if self._ends_with_update:
            self._loop.update()
        self.window.close(self._step)
        if self.window.verifier is not None:
            self.window.verifier.after_update(self.trainee, self._step)

    def end_update(
        self, updated: bool, grad_norm: float | None, inner_optimizers: Iterable[object] = ()
    ) -> None:
        """Note that the framework's optimizer step has returned; without an update the step is skipped.

        Args:
            inner_optimizers: the optimizers of the call; a call with optimizers other than the protected ones
                (as in a GAN) is ignored.

        Raises:
            UnsupportedError: the optimizers have updated in this step, and their hooks have not reported the
                update.
        """
        if self.trainee is None or self._step < 0:
            return
        inner = list(inner_optimizers)
        if inner and not any(map(self.window.owns, inner)):
            return
        # Of an older chain each optimizer tells, also while others have yet to make their update.
        if updated and self.board.finished < self._step and self.window.has_all(inner):
            self._refuse_update(inner)
        self.board.grad_norm = float(grad_norm or 0.0)
        if not updated and self.board.finished < self._step:
            for hook in self._hooks:
                hook.before_update()
            self.window.skip(self.trainee, self._step)
        if self._ends_with_update:
            self.end_step()
        self._report_protection_once()

    def before_save(self) -> None:
        """Compare the holders of the state before a regular save on the training thread; collective.

        Raises:
            Unwind: the holders differ, so the state is not saved.
            RuntimeError: a rank is gone.
        """
        if self.trainee is not None and self.is_on_this_thread:
            self.window.require_equal(self.trainee, self.board.finished)

    def publishing(self, act: Callable[[], None]) -> None:
        """Run `act`, which publishes a regular checkpoint, but not while an incident is open."""
        self.door.enter(PUBLISH)
        try:
            act()
        finally:
            self.door.leave()

    @contextlib.contextmanager
    def moving_state(self) -> Iterator[None]:
        """Let the block move tensors of the state to other memory; see `UpdateWindow.moving`."""
        if self.trainee is None:
            yield
            return
        if self.copier is not None:
            self.copier.wait()
        with self.window.moving(self.trainee.device):
            yield

    def hold(self, until: threading.Event | None = None) -> None:
        """Keep the main thread, and with it the process and the state, until the processor ends the process.

        A signal handler may raise on this thread, which would end the process. torch's handler raises for
        each killed data loader: when all processes of a job are ended, a rank loses several data loaders.

        Args:
            until: ends the hold, too.
        """
        drop_sigchld_handler()
        end = until or threading.Event()
        while not end.is_set():
            with contextlib.suppress(Exception):
                end.wait()

    def _report_protection_once(self) -> None:
        if self.trainee is not None and not self._is_protected and self.has_finished_a_step:
            self._is_protected = True
            self._on_protected(self.trainee, self.board.finished)

    # processor's threads

    def end_step_left_by_break(self) -> bool:
        """End a step that its loop has left without a report; return whether a step was ended."""
        step = self.board.inside
        if not self._ends_with_update or self.board.finished >= step:
            return False
        if not self._loop.was_left(self._thread) or self.board.inside != step:
            return False
        self.pace.abandon_step()
        return True

    def from_local_copy(self, step: int) -> bool:
        """Return True if `step`, to which this rank was brought, is in the local copy, not the live state."""
        return step < self.board.live

    def record_of(self, step: int) -> Any:
        """Return everything of `step` besides tensors. Raises LookupError if the record has been dropped."""
        assert self.trainee is not None
        return self._history.record_of(step, self.trainee)


def drop_sigchld_handler() -> None:
    """Restore the default of SIGCHLD: the handler, often torch's, belongs to the script, which has ended."""
    with contextlib.suppress(ValueError):  # not the main thread, so no handler runs here
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
