"""The object of a custom training loop on Megatron-core; `adaptor.protect` makes it
(`adaptor/frameworks/library_loop.py`).
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from adaptor.errors import StepError
from adaptor.protocol.messages import ScriptStage
from adaptor.worker.session import Session

# Is given the last finished step, and the counters after it.
GoBack = Callable[[int, Mapping[str, int | float]], Any]
T = TypeVar("T")


class Protection:
    """The result of `adaptor.protect`: the training loop reports its steps and phases to the object.

    Args:
        session: of this process; None where the adaptor is not enabled.
        steps_done: the last finished step.
        recovery: online recovery (`OwnLoopRecovery`), if available in this process.
    """

    def __init__(self, session: Session | None, steps_done: int = 0, recovery: Any = None) -> None:
        self._session = session
        self._done = steps_done
        self._recovery = recovery
        self._has_run = False
        self._is_in_loop = False

    def run_steps(
        self, one_step: Callable[[int], Any], last: int, go_back: Callable[[int], Any] | None = None
    ) -> None:
        """Call `one_step(number)` for each step after `step` of `adaptor.protect`, up to `last`.

        A script calls the function once. Each call is inside of `with protection.step(number):`. Besides, a
        fault need not start all ranks again (TTP_ONLINE): the survivors stay in this call, a new process of
        the failed rank runs the script up to this call and gets its state from the survivors, and `one_step`
        is called for the step after the last finished step, again if already begun.

        Args:
            one_step: forward and backward pass, optimizer and scheduler, and further work of the step, such
                as its line in a log. The same number gives the same data. A return value of False, on all
                ranks in the same step, makes the step the last step.
            last: the number of the last step.
            go_back: is called on each rank before training goes on after a fault, with the number of the last
                finished step: the script's own counters, and an iterator over its data, must continue after
                the step. The function may draw random numbers: afterwards the random states of the step are
                restored.

        Raises:
            StepError: only some of the optimizers made their update; `run_steps` is called a second time; or
                `one_step` is no function.
        """

        if not callable(one_step):
            raise StepError(f"one_step is {one_step!r}: it must be a function of the number of a step")

        def loop(last: Any) -> None:
            finished_step = self._done if self._session is None else self._session.board.finished
            for number in range(finished_step + 1, last + 1):
                with self.step(number):
                    if one_step(number) is False:
                        return

        behind = None if go_back is None else lambda step, _counters: go_back(step)
        self._run("run_steps", loop, behind, last=whole_number(last))
        if self._session is not None:
            self._session.board.reach(ScriptStage.TRAINED)

    def run_loop(
        self,
        loop: Callable[[], T],
        go_back: GoBack,
        why_not: str = "",
    ) -> T:
        """Call `loop`, a framework's own, whose steps are made in `with protection.step(number):`.

        A plug-in calls the function once, in the place of the loop. After a fault (TTP_ONLINE) the survivors
        leave `loop` by an exception, and a new process of the failed rank comes to this call and gets its
        state from the survivors. Then `go_back` and `loop` are called on all ranks.

        Args:
            loop: makes the steps after the framework's present step. Temporary changes are undone in a
                `finally`, or by `go_back`.
            go_back: is called with the step after which training goes on, and the framework's counters after
                the step (`counters` of `CheckpointContents`): the last finished step, or that of copies in
                host memory, many steps earlier. The function sets the framework to the step: counters, data,
                flags of the loop. The function may draw random numbers: afterwards the random
                states of the step are restored.
            why_not: why this job cannot call `loop` again, for a line at the start; a fault then starts all
                ranks again. Empty: `loop` can be called again.

        Returns:
            The result of `loop`.

        Raises:
            StepError: `run_loop` or `run_steps` was called before.
        """
        return self._run("run_loop", lambda _last: loop(), go_back, why_not)

    def _run(
        self, name: str, loop: Callable[[Any], T], go_back: GoBack | None, why_not: str = "", last: Any = None
    ) -> T:
        if self._has_run:
            raise StepError(
                f"protection.{name} was called a second time: a new process of a failed rank can only come "
                "to the first call; make all steps in one call"
            )
        self._has_run = True
        if self._recovery is None:
            return loop(last)
        self._is_in_loop = True
        result: T = self._recovery.run(loop, go_back, why_not, last)
        return result

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Take a step of the training loop: `with protection.step(step):` around forward and backward pass,
        optimizer and scheduler.

        A hang of the rank in the step is noticed (TTP_HANG).

        Args:
            step: its number, from 1; each number is the previous number plus 1.

        Raises:
            StepError: the number does not follow the previous number; or only some of the optimizers made
                their update.
        """
        if self._session is None:
            yield
            return
        self._begins_by_itself()
        step = whole_number(step)
        self._session.require_next(step)
        with self._session.step(step, updates_finish=True):
            yield

    def begin_step(self, step: int) -> None:
        """Begin `step` on this rank, in a loop without a place for `with protection.step(...)`.

        Call the function when optimizer and scheduler have finished the previous step. A hang is noticed
        until the optimizer has made its update, or `end_step` is called; later work may take any time.

        Args:
            step: its number, from 1; each number is the previous number plus 1. A step without an update may
                be begun again.

        Raises:
            StepError: the number does not follow the previous number.
        """
        if self._session is not None:
            self._begins_by_itself()
            step = whole_number(step)
            self._session.require_next(step)
            self._session.begin_step(step, ends_with_update=True, updates_finish=True)

    def _begins_by_itself(self) -> None:
        """The loop makes its steps without `run_steps`, so the steps cannot be repeated."""
        if self._recovery is not None and not self._is_in_loop:
            self._recovery.decline()
            self._recovery = None

    def end_step(self) -> None:
        """End the step of `begin_step` without an update.

        Call the function where `break` leaves the loop. Without the call the adaptor compares the position
        with the lines of earlier begins and updates, if the loop calls both; otherwise the following code
        counts as a part of the step. After an update, or outside of a step, the call does nothing.
        """
        if self._session is not None:
            self._session.end_step()

    def end_training(self) -> None:
        """The training loop is over: later work, such as a last evaluation or save, may take any time.

        If a process dies afterwards, the last step is saved, and all ranks restart. After an exception the
        last step is saved, and the job ends.
        """
        if self._session is not None:
            self._session.end_training()
            self._session.board.reach(ScriptStage.TRAINED)

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Mark a phase with its own duration: `with protection.phase("evaluation"):`.

        A phase lies between two steps or inside of a step. The first phase of a name may take any time. A
        later phase is a hang when longer than five times the slowest recent phase of the same name, and
        longer than five times TTP_HANG.

        Args:
            name: the kind of the phase; durations are compared between phases of the same name.
        """
        return contextlib.nullcontext() if self._session is None else self._session.phase(name)

    def moving_state(self) -> contextlib.AbstractContextManager[None]:
        """Mark a move of weights or optimizer state to other memory: `with protection.moving_state():`.

        A loop that puts the state into host memory for a part of a step does so in one block, and brings it
        back in another. The block waits while an incident is open, and needs no other rank. Main params and
        moments stay readable between the blocks; the memory of a buffer of weights may have size 0.
        """
        return contextlib.nullcontext() if self._session is None else self._session.moving_state()


def whole_number(step: Any) -> int:
    """Return the number of a step. Raises StepError: the argument is no whole number."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise StepError(f"step is {step!r}: it must be a whole number, 0 or more")
    return number
