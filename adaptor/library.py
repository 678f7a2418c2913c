"""Protects scripts with Megatron-core as a library and a custom training loop."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from adaptor.errors import StepError, UnsupportedError
from adaptor.protocol.messages import ScriptStage
from adaptor.worker.session import Session

if TYPE_CHECKING:
    from adaptor.frameworks.library_loop import GoBack, OwnLoopRecovery

T = TypeVar("T")


class Protection:
    """The result of `adaptor.protect`: the training loop reports its steps and phases to the object.

    Args:
        session: of this process; None where the adaptor is not enabled.
        steps_done: the last finished step.
        recovery: online recovery, if available in this process.
    """

    def __init__(
        self, session: Session | None, steps_done: int = 0, recovery: OwnLoopRecovery | None = None
    ) -> None:
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
            StepError: only some of the optimizers made their update; or `run_steps` is called a second time.
        """

        def loop(last: Any) -> None:
            done = self._done if self._session is None else self._session.board.finished
            for number in range(done + 1, last + 1):
                with self.step(number):
                    if one_step(number) is False:
                        return

        behind = None if go_back is None else lambda step, _counters: go_back(step)
        self._run("run_steps", loop, behind, last=_whole_number(last))
        if self._session is not None:
            self._session.board.reach(ScriptStage.TRAINED)

    def run_loop(
        self,
        loop: Callable[[], T],
        go_back: Callable[[int, Mapping[str, int | float]], Any],
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
        return self._recovery.run(loop, go_back, why_not, last)

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
        step = _whole_number(step)
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
            step = _whole_number(step)
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


def _whole_number(step: Any) -> int:
    """Return the number of a step. Raises StepError: the argument is no whole number."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise StepError(f"step is {step!r}: it must be a whole number, 0 or more")
    return number


def _require_megatron(model: Any, optimizer: Any) -> list[Any]:
    """Return the chunks of the model.

    Raises:
        UnsupportedError: Megatron-core has not made the chunks or the optimizer.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    if not chunks or not all(hasattr(chunk, "ddp_config") and hasattr(chunk, "config") for chunk in chunks):
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "empty"
        raise UnsupportedError(
            f"model is {kinds}: adaptor.protect needs a list of Megatron-core's DistributedDataParallel"
        )
    if not hasattr(optimizer, "get_loss_scale"):
        raise UnsupportedError(
            f"optimizer is {type(optimizer).__name__}: adaptor.protect needs what Megatron-core's "
            "get_megatron_optimizer returned"
        )
    return chunks


def _claim(optimizer: Any) -> None:
    """Claim the job, unless claimed before its process groups were made; present groups stay unchanged."""
    from adaptor import context, patching
    from adaptor.frameworks import optimizer_instances
    from adaptor.replica.choice import ReplicaChoice

    if patching.claim("ttp"):
        context.part(ReplicaChoice).cannot_split(
            "the process groups were made before adaptor.enable() was called, or without it"
        )
        optimizer_instances.let_pass_the_door(optimizer)


def protect(
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    step: int,
    samples_per_step: int | Callable[[], int],
    format: str,
    **described: Any,
) -> Protection:
    """Do the work of `adaptor.protect`, if the adaptor is enabled; with the same arguments.

    Raises:
        UnsupportedError: as `adaptor.protect` says.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.package_info import __version__

    from adaptor import context, hooks, patching
    from adaptor.checkpoint import left_overs, save_folder_claim
    from adaptor.frameworks import (
        kernel_timeout,
        library_loop,
        optimizer_instances,
        state_comparison,
        supported_options,
        training_loop,
    )
    from adaptor.frameworks.library_loop import OwnLoopRecovery
    from adaptor.online import rejoin
    from adaptor.worker import runtime

    patching.check("ttp")
    supported_options.require_no_layout_only()
    step = _whole_number(step)
    increment = samples_per_step if callable(samples_per_step) else lambda: samples_per_step
    model = _require_megatron(model, optimizer)
    optimizer_instances.require_groups()
    _claim(optimizer)
    kernel_timeout.note(model[0].config)
    if not hasattr(parallel_state, "get_expert_data_parallel_world_size"):
        raise UnsupportedError(
            f"Megatron-core is {__version__}: adaptor.protect needs 0.10 or later; set ENABLE_TTP=False"
        )
    # A rank that trains nothing has an empty chain of optimizers, which has no config.
    supported_options.require_protected(
        getattr(optimizer, "config", None), model[0].config, model[0].ddp_config, format=format
    )
    if model[0].config.num_moe_experts is not None:
        supported_options.require_folders_for_experts(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
    supported_options.require_no_replay()
    for hook in hooks.of_worker():
        hook.require_other_loop(torch.distributed.get_world_size())
    worker = rejoin.of_this_process()
    comes_new = worker is not None and worker.newcomer  # this job is in the middle of its training
    if not comes_new:
        save_folder_claim.require_writable(save)
        library_loop.require_asked()
        save_folder_claim.require_no_later_step(save, step)
    if torch.distributed.get_rank() == 0 and not comes_new:
        save_folder_claim.claim(save)
        left_overs.clean(Path(save))
    # A new process does not ask: the ranks that train tell it whether they make copies.
    copies = comes_new or context.part(library_loop.CopiesAsked).asked
    training_loop.attach(copies=copies)
    protected = library_loop.protected_state(
        model=model,
        optimizer=optimizer,
        save=save,
        format=format,
        increment=increment,
        may_copy=copies,
        **described,
    )
    recovery = None if worker is None else OwnLoopRecovery(worker, protected)
    compare = partial(state_comparison.compare_own_load, Path(save), step) if step else None
    training_loop.begin_training(protected, step, compare)
    return Protection(runtime.get().session, step, recovery)


def write_host_copies(*, model: Sequence[Any], optimizer: Any, **described: Any) -> int | None:
    """Do the work of `adaptor.write_host_copies`, if the adaptor is enabled; with the same arguments."""
    from adaptor import patching
    from adaptor.frameworks import library_loop
    from adaptor.online import rejoin

    patching.check("ttp")
    chunks = _require_megatron(model, optimizer)
    _claim(optimizer)
    if rejoin.is_newcomer():  # its state comes from others
        return None
    return library_loop.write_host_copies(
        library_loop.protected_state(model=chunks, optimizer=optimizer, **described)
    )
