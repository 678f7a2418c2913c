"""The begin of training, in every loop; and the training loops of Megatron-LM and ModelLink, called again
after a recovery: their base class, and the calls that their patches make.

Both have `get_args` in a package, and count on the same arguments; a subclass names the package
(`online.state.Loop` documents the methods). `Protection.run_loop` is not enough for them: a newcomer builds
its data by the step, and what a rank has missed after a step (log line, evaluation, save) is made again.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from adaptor import context, hooks
from adaptor.checkpoint import step_record
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee, ProtectedState
from adaptor.checkpoint.training_state import FLOPS
from adaptor.context import Context
from adaptor.frameworks import megatron_settle, state_comparison
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.frameworks.step_log import StepLog
from adaptor.frameworks.step_tail import StepTail, TailState
from adaptor.host_copy import content, copier, reservation
from adaptor.online import rejoin, state
from adaptor.online.data_rewind import STEPS, DataRewind
from adaptor.replica import group
from adaptor.worker import runtime
from adaptor.worker.framework_watchdogs import Watchdogs

T = TypeVar("T")

# A copy of each rank is made, and kept by another node, within so many intervals between copies.
_MOST_INTERVALS = 4
# What a step, and the evaluation after it, count on.
_CONSUMED = ("consumed_train_samples", "consumed_valid_samples")


class Recovery:
    """Online recovery in this process.

    Attributes:
        loop: the training loop of the framework, once that was called
        answers: in a newcomer: what the framework would have asked other ranks at its start
    """

    def __init__(self, _context: Context) -> None:
        self.loop: TrainingLoop | None = None
        self.answers: dict[str, dict[str, Any]] = {}


def attach(*, copies: bool = True) -> None:
    """Let this rank compare its state with other holders, and with `copies` make copies in host memory.

    The function is called before training begins.
    """
    worker = runtime.get()
    if isinstance(worker, runtime.Runtime):  # other engines make no copies, and compare nothing
        if copies:
            copier.attach(worker.session, worker.tell_of_copy)
        state_comparison.attach(worker)


def begin_training(
    protected: ProtectedState, step: int, compare: Callable[[MegatronTrainee], None] | None = None
) -> None:
    """Let training begin with the state of `step`, which can be saved from now on; in a newcomer prepare the
    loop. Collective.

    Args:
        compare: compares the state with the checkpoint that was loaded.
    """
    everyone = group.of_everyone()  # also in a newcomer, in its place among the groups of the job
    if rejoin.is_newcomer():
        return
    session = runtime.get().session
    trainee = protected.trainee(everyone, is_repeated=False)
    if compare is not None:
        compare(trainee)
    trainee = reservation.reserve(session, trainee)
    context.part(Watchdogs).warn_if_on()
    for hook in hooks.of_worker():
        hook.watch(trainee.state.model)
    session.begin_training(trainee, step_record.inner(protected.optimizer), step)


def train(
    why_not: Callable[[], str],
    make: Callable[[], TrainingLoop],
    begin: Callable[[], None],
    wrapped: Callable[[], T],
    tolerance: contextlib.AbstractContextManager[None] | None = None,
) -> T:
    """Call the framework's loop `wrapped`, and again after each fault that is recovered online.

    Args:
        why_not: returns why the job is not recovered online; empty: the job is.
        make: describes the loop and the loop's call.
        begin: checks the job, and calls `begin_training`.
        wrapped: the loop, with the arguments of its call.
        tolerance: is entered around the loop.
    """
    worker = rejoin.of_this_process()
    with tolerance or contextlib.nullcontext():
        if worker is not None:
            worker.set_online_support(reason := why_not())
        if worker is None or (reason and not worker.newcomer):
            begin()
            result = wrapped()
        else:
            loop_of_job = context.part(Recovery).loop = make()
            begin()

            def call() -> T:
                result = wrapped()
                loop_of_job.end()
                return result

            result = worker.run(loop_of_job, call)
    runtime.get().session.end_training()
    return result


def take_place(args: Any) -> StepRecord:
    """Set a newcomer to the step of the job; model and optimizer are built, and no data is read yet.

    Args:
        args: of the framework.
    """
    worker = rejoin.of_this_process()
    assert worker is not None
    copies: list[content.CopyRecord] = []

    def read(step: int) -> StepRecord:
        copies.append(content.read_record(content.own_copy(step)))
        return copies[0].record

    record, answers, *_ = worker.ask_record(read)
    set_args(args, {**record.counters, "iteration": record.step})
    for copied in copies:  # made when the tail of the step was over; the twin may have other data, or none
        tail = TailState(record.step, {}, [])._asdict()
        answers = {**answers, "log": {"copied": copied.kept}, "tail": tail}
    context.part(Recovery).answers.update(answers)
    if consumed_before := answers["tail"]["consumed_before"]:
        # Its data begins there, with an evaluation that may come again.
        set_args(args, {"consumed_valid_samples": consumed_before["consumed_valid_samples"]})
        if not getattr(args, "dataloader_save", None):
            set_args(args, {"iteration": record.step - 1})
    return record


def begin_step(step: int) -> None:
    """`step` begins in a loop that may be called again."""
    running = context.part(Recovery).loop
    if running is not None:
        running.begin_step(step)


def end_step() -> None:
    """End the current step in a recoverable loop."""
    running = context.part(Recovery).loop
    if running is not None:
        running.end_step()


def log_of_this_process() -> StepLog | None:
    """Return the log of the loop; None where none is running that may be called again."""
    running = context.part(Recovery).loop
    return None if running is None else running.log


def logged(result: T, note: Callable[[StepLog, T], object]) -> T:
    """Return `result` of the framework, noted by `note` in the log of the loop, if there is a log."""
    if (log := log_of_this_process()) is not None:
        note(log, result)
    return result


@contextlib.contextmanager
def loads_nothing(args: Any) -> Iterator[None]:
    """Load nothing while a newcomer builds its model: no checkpoint is read, and the survivors send the
    state.

    The newcomer draws its weights all the same: without `perform_initialization` the framework leaves out the
    mark at a weight that is cut by tensor parallelism.
    """
    names = [name for name in ("load", "pretrained_checkpoint") if hasattr(args, name)]
    values_before = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in values_before.items():
            setattr(args, name, value)


class ProtectedLoop(state.Loop):
    """A training loop with a description of its state."""

    def __init__(self, protected: ProtectedState) -> None:
        self.protected = protected
        self._model, self._optimizer = protected.model, protected.optimizer
        self._session = runtime.get().session
        self._record: StepRecord | None = None  # of the step to go back to, before the next

    def settle(self, step: int) -> None:
        megatron_settle.settle_core(self._model)
        megatron_settle.settle_optimizer(self._optimizer)

    def gather_weights(self) -> None:
        megatron_settle.gather_weights(self._model, self._optimizer)

    def put_back_copy(self, step: int) -> StepRecord:
        return content.put_back(step, self._optimizer, self._model)


class TrainingLoop(ProtectedLoop):
    """A training loop of Megatron-LM or ModelLink, as it was called.

    Args:
        train_call: the arguments of the call of `train`, by their names.
        train: the replayable data of training.
        valid: the replayable data of evaluation.

    Attributes:
        framework: the package with `get_args`
        module: the module of the loop, by whose names it evaluates, writes its log and saves
        asked: what the framework finds out by asking other ranks before its loop, and keeps in its arguments
        start: the loop takes its position from these arguments when it is called
    """

    framework: str
    module: str
    asked: tuple[str, ...] = ("do_train", "do_valid", "do_test")
    start: tuple[str, ...] = ("iteration",)
    log: StepLog

    def __init__(
        self,
        protected: ProtectedState,
        train_call: Mapping[str, Any],
        train: Sequence[DataRewind],
        valid: Sequence[DataRewind],
    ) -> None:
        super().__init__(protected)
        self.args: Callable[[], Any] = importlib.import_module(self.framework).get_args  # asked in each step
        self._given = train_call
        self._scheduler = protected.scheduler
        self._train, self._valid = train, valid
        answers = context.part(Recovery).answers
        self._tail = StepTail(valid, TailState(**answers["tail"]) if "tail" in answers else None)
        self._board = self._session.board
        log = answers.get("log", {})
        # A copy in host memory has the log of its step. Where the board is lost with its node, the twin's
        # part of the log is all that is left.
        self._kept: bytes = log.get("copied") or self._board.kept or log.get("kept", b"")
        self._start = answers.get("start") or {name: getattr(self.args(), name) for name in self.start}
        self._oldest = -1  # never before this step can the job go back
        self._device = next(
            (parameter.device for chunk in self._model for parameter in chunk.parameters()), "cpu"
        )

    def set_args(self, values: Mapping[str, Any]) -> None:
        """Set arguments of the framework."""
        set_args(self.args(), values)

    def answers(self, step: int) -> Mapping[str, Any]:
        args = self.args()
        return {
            "asked": {name: getattr(args, name) for name in self.asked if hasattr(args, name)},
            "start": self._start,
            "tail": self._tail.state(step)._asdict(),
            "log": {"kept": self.log.state(step)},
        }

    def begin_step(self, step: int) -> None:
        """`step` begins, for the first time or once more."""
        args, oldest = self.args(), self._oldest_wanted(step)
        self.log.begin_step(step, oldest)
        self._tail.begin_step(step, {name: getattr(args, name) for name in _CONSUMED}, oldest)
        for replay in self._train:
            replay.begin_step(step, oldest)
        if self._oldest < 0:
            self._oldest = step - 1
        self._oldest = max(self._oldest, oldest, *(replay.oldest for replay in (*self._train, *self._valid)))

    def _oldest_wanted(self, step: int) -> int:
        """Return the oldest step to which the job may have to go back from `step`.

        No rank has a use for copies from before a step that all have copied, or that is saved; and where no
        copies are made any more, no data is kept for them.
        """
        made = self._session.copier
        if made is None:
            return step - STEPS
        of_copies = max(made.sure, step - _MOST_INTERVALS * made.steps_between)
        return min(step - STEPS, max(of_copies, context.part(RegularSaves).newest))

    def copied_steps(self) -> tuple[int, ...]:
        made, oldest = self._session.copier, max(self._oldest, context.part(RegularSaves).newest)
        return () if made is None else tuple(step for step in made.steps if step >= oldest)

    def end_step(self) -> None:
        """A step has ended; the loop counts the step, and writes the step's line."""

    def end(self) -> None:
        """The loop is over."""

    def agree(self, step: int) -> None:
        def all_have(is_done: bool) -> bool:
            vote = torch.tensor([int(is_done)], device="cpu")
            dist.all_reduce(vote, dist.ReduceOp.MIN, group.of_training_job())
            return bool(vote.item())

        self._tail.agree(step, all_have)

    def put_back(self, record: StepRecord) -> None:
        self._record = record
        self.set_args({name: value for name, value in record.counters.items() if name != FLOPS})
        self.set_loop(record)
        consumed = self._put_back_consumed(record.step)  # where batches grow, the loop saves
        self.log.go_back(record.step)
        self.batch_sizes().update_num_microbatches(consumed, consistency_check=False)

    def set_loop(self, record: StepRecord) -> None:
        """Set the values that the loop reads when called."""
        self.set_args({"iteration": record.step})

    def batch_sizes(self) -> Any:
        """Return the module with the sizes of the batches."""
        return importlib.import_module(self.framework)

    def _put_back_consumed(self, step: int) -> int:
        """Set how many samples were consumed when the loop is called again after `step`.

        Returns:
            The samples of training, which determine the size of the loop's batches.
        """
        if not self._tail.is_pending:
            return int(self.args().consumed_train_samples)
        # The line of the step, and its evaluation, have batches of its size.
        consumed_before = self._tail.consumed_before(step)
        self.set_args({"consumed_valid_samples": consumed_before["consumed_valid_samples"]})
        return int(consumed_before["consumed_train_samples"])

    def finish_step(self) -> None:
        record, self._record = self._record, None
        if record is None:  # the loop is called for the first time
            return
        self.leave_loop(record)
        if record.step > self._start["iteration"]:  # else its line is in the log of the job before
            # A rank that was lost before it wrote the line may have let all others begin the next step.
            self.log.complete(record.step, group.of_training_job(), self._optimizer, self._model)
            # The line makes entries for what it has not found, of sizes that need not be those of the model.
            megatron_settle.forget_auxiliary_losses()
        if self._tail.take_pending() is not None:
            self.make_tail(record)
        self.set_loop(record)

    def leave_loop(self, record: StepRecord) -> None:
        """Set the values that the loop has set behind a step."""

    def make_tail(self, record: StepRecord) -> None:
        """Evaluate, save and end the job after the step of `record` as the loop does."""
        raise NotImplementedError


def set_args(args: Any, values: Mapping[str, Any]) -> None:
    """Set some arguments of a framework."""
    for name, value in values.items():
        setattr(args, name, value)
