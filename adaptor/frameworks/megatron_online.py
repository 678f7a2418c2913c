"""Online recovery in Megatron-LM: its training loop, called again from the end of a finished step, and the
start of a newcomer, its step and its data. The supported jobs: `megatron_online_support.py`.

The loop reads its position from the arguments when called, so the arguments are set to the step first. An
exception leaves further unfinished work (`megatron_settle.py`); the assertions of the loop at its call are
named here. Lines are those of 0.15.0rc5; the names are the same from 0.12 to main.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adaptor import context
from adaptor.checkpoint import step_record
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import ProtectedState
from adaptor.checkpoint.training_state import FLOPS
from adaptor.frameworks import megatron_lm, megatron_settle, training_loop
from adaptor.frameworks.megatron_online_support import why_not
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.frameworks.step_log import StepLog
from adaptor.frameworks.training_loop import Recovery, TrainingLoop, set_args
from adaptor.online.data_rewind import DataRewind

# What the loop sets in the config of the model when it is called, and asserts that nobody has (2036 to 2060).
_CONFIG = (
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "grad_scale_func",
    "finalize_model_grads_func",
    "timers",
)


class MegatronLog(StepLog):
    """The log of one rank of Megatron-LM, which puts losses together in `train_step` (1310 to 1340)."""

    def args(self) -> Any:
        from megatron.training.global_vars import get_args

        return get_args()

    def timers(self) -> Any:
        from megatron.training.global_vars import get_timers

        return get_timers()

    def joined(self, losses: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return of each loss the sum and the number of tokens, or a mean: the framework would get the same
        result from a single micro-batch with the returned values.
        """
        if getattr(self.args(), "sft", False):
            raise NotImplementedError("versions of the framework differ in how they average them")
        joined_losses = {}
        for key in losses[0] if losses else ():
            values = [micro_batch_losses[key] for micro_batch_losses in losses]
            if isinstance(values[0], (tuple, list)):  # up to 0.12, and reduced over all ranks already
                joined_losses[key] = sum(loss[0] for loss in values) / sum(loss[1] for loss in values)
            elif values[0].numel() == 1:
                joined_losses[key] = torch.cat([loss.view(-1) for loss in values]).mean()
            else:
                joined_losses[key] = torch.vstack([loss.view(-1) for loss in values]).sum(dim=0)
        return joined_losses

    def over_all_ranks(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        summed_losses = {}
        for key, own_loss in losses.items():
            value = own_loss.clone()
            if value.numel() == 2:
                dist.all_reduce(value, group=group)
                value = value[0] / value[1]
            summed_losses[key] = value
        return summed_losses

    def as_told(self, norm: float | None) -> float | None:
        """Return the norm as ranks of a model send it to each other, with rounding; collective."""
        from megatron.training import training

        tell = getattr(training, "reduce_max_stat_across_model_parallel_group", None)
        return norm if tell is None else tell(norm)

    def of_optimizer(self, optimizer: Any) -> dict[str, Any]:
        rate, decoupled = _learning_rates(optimizer)
        return {
            "learning_rate": rate,
            "decoupled_learning_rate": decoupled,
            "loss_scale": 1.0 if getattr(optimizer, "is_stub_optimizer", False) else _scale(optimizer),
        }


def _learning_rates(optimizer: Any) -> tuple[float | None, float | None]:
    """Return the learning rate, and the rate of decoupled parameters, as the loop reads both."""
    from megatron.training import training

    if hasattr(training, "get_canonical_lr_for_logging"):  # since 0.16, where there is one
        return training.get_canonical_lr_for_logging(optimizer.param_groups), None
    rate = decoupled = None
    for group in optimizer.param_groups:
        if group["params"]:
            if group.get("is_decoupled_lr"):
                decoupled = group["lr"]
            else:
                rate = group["lr"]
    return rate, decoupled


def _scale(optimizer: Any) -> float:
    return float(optimizer.get_loss_scale().item())


class MegatronLoop(TrainingLoop):
    """Megatron-LM's training loop, as it was called (`online.state.Loop`).

    Attributes:
        uncounted: the log's text for zeros in the gradients if the zeros are not counted
    """

    framework = "megatron.training"
    module = "megatron.training.training"
    asked = (*TrainingLoop.asked, "eval_iters")
    # At other times they have the values of the start of the job.
    start = (*TrainingLoop.start, FLOPS)
    uncounted: int | None = None

    def __init__(self, protected: ProtectedState, train_call: Mapping[str, Any]) -> None:
        train = _replayed(train_call["train_data_iterator"])
        valid = _replayed(train_call.get("valid_data_iterator"))
        super().__init__(protected, train_call, train, valid)
        config = self._config = train_call.get("config")
        self._config_before = {name: getattr(config, name) for name in _CONFIG if hasattr(config, name)}
        self._is_set = False  # for a call of the loop that has not come to its first step
        start, keep = self._start["iteration"], self._board.keep
        self.log = MegatronLog(keep, self._kept, start, self.module, self.uncounted, self._device)

    def begin_step(self, step: int) -> None:
        """`step` begins: the loop has read the values set for the begin of the loop alone."""
        super().begin_step(step)
        if self._is_set:
            self.set_args(self._start)
            self._is_set = False

    def end(self) -> None:
        """The loop is over: no save has the values that were set for the loop alone."""
        if self._is_set:
            self.set_args({**self._start, "curr_iteration": self.args().iteration - 1})
            self._is_set = False

    def missing_operations(self) -> float:
        """Return, once, the floating-point operations that the loop forgets when it is called again."""
        return 0

    def settle(self, step: int) -> None:
        for replay in self._train:
            replay.rewind(step)
        for name, value in self._config_before.items():
            setattr(self._config, name, value)
        super().settle(step)
        megatron_settle.settle_globals()
        context.part(RegularSaves).abandon()
        megatron_settle.abandon_async_saves(self._given.get("checkpointing_context"))

    def put_back(self, record: StepRecord) -> None:
        super().put_back(record)
        context.part(megatron_lm.Operations).begin(record.counters.get(FLOPS, 0))
        if getattr(self.args(), "overlap_param_gather", False):
            for chunk in self._model:  # the loop disables them first (2148)
                if not getattr(chunk, "remove_forward_pre_hook_handles", True):
                    chunk.enable_forward_pre_hook()

    def batch_sizes(self) -> Any:
        return megatron_lm.batch_sizes()

    def set_loop(self, record: StepRecord) -> None:
        self._is_set = True
        self.set_args({"iteration": record.step, "curr_iteration": record.step})
        if FLOPS in record.counters:
            self.set_args({FLOPS: record.counters[FLOPS]})

    def leave_loop(self, record: StepRecord) -> None:
        self.set_args({**self._start, "curr_iteration": record.step - 1})

    def make_tail(self, record: StepRecord) -> None:
        from megatron.training import get_timers

        training, args, train_call = importlib.import_module(self.module), self.args(), self._given
        step = record.step
        if importlib.util.find_spec("megatron.core.rerun_state_machine") is not None:
            from megatron.core.rerun_state_machine import get_rerun_state_machine

            get_rerun_state_machine().current_iteration = step
        for replay in self._valid:
            replay.begin_step(step)
        if args.do_valid and args.eval_interval and step % args.eval_interval == 0:
            hooked = training.should_disable_forward_pre_hook(args)
            if hooked:
                training.disable_forward_pre_hook(self._model)
            training.evaluate_and_print_results(
                f"iteration {step}",
                train_call["forward_step_func"],
                train_call["valid_data_iterator"],
                self._model,
                step,
                train_call["process_non_loss_data_func"],
                self._config,
                verbose=False,
                write_to_tensorboard=True,
                non_loss_data_func=train_call.get("non_loss_data_func"),
            )
            if hooked:
                training.enable_forward_pre_hook(self._model)
        # The loop lets it run, and the save stops it and starts it again.
        timer = get_timers()("interval-time", log_level=0)
        timer.start()
        ends = self.save(step, record.counters.get(FLOPS, 0))
        timer.reset()
        if ends:
            sys.exit(0)

    def save(self, step: int, operations: float) -> bool:
        """Save after `step` as the loop does, if a save is due; return whether the job ends there."""
        training = importlib.import_module(self.module)
        return bool(
            training.checkpoint_and_decide_exit(
                self._model,
                self._optimizer,
                self._scheduler,
                step,
                operations,
                self._given["checkpointing_context"],
                self._given["train_data_iterator"],
            )
        )


class FlagscaleLoop(MegatronLoop):
    """FlagScale's copy of the loop, as it was called (`online.state.Loop`)."""

    module = "flagscale.train.train"


def _replayed(iterators: Any) -> list[DataRewind]:
    """Put a `DataRewind` below the framework's own iterators, which keep only the data of a single step."""
    replays: list[DataRewind] = []
    for iterator in iterators if isinstance(iterators, list) else [iterators]:
        if iterator is not None and hasattr(iterator, "iterable"):
            replay = DataRewind(iterator.iterable)
            iterator.iterable = replay
            replays.append(replay)
    return replays


def train(
    wrapped: Callable[..., Any],
    args: Any,
    kwargs: Any,
    operations: float,
    kind: type[MegatronLoop] | None = None,
    rerun: bool = True,
    tolerance: contextlib.AbstractContextManager[None] | None = None,
) -> Any:
    """Call the framework's training loop `wrapped`, and again after each fault that is recovered online.

    Args:
        operations: the floating-point operations so far, where the loop begins to count.
        kind: the class of the loop; None: Megatron-LM's, or FlagScale's copy, by the module of `wrapped`.
        rerun: whether the loop's saves have the state of the rerun state machine, if present.
        tolerance: is entered around the loop.
    """
    training_loop.attach()
    call, protected = megatron_lm.describe_call(args, kwargs, operations, rerun)
    own = FlagscaleLoop if wrapped.__module__ == FlagscaleLoop.module else MegatronLoop
    return training_loop.train(
        lambda: why_not(protected.args, call),
        lambda: (kind or own)(protected, call),
        lambda: megatron_lm.begin_training(protected),
        lambda: wrapped(*args, **kwargs),
        tolerance,
    )


def missing_operations() -> float:
    """Return, once, the floating-point operations that the loop has lost by being called again."""
    loop = context.part(Recovery).loop
    return loop.missing_operations() if isinstance(loop, MegatronLoop) else 0


def take_place(args: Any) -> None:
    """Set a newcomer to the step of the job; model and optimizer are built, and no data is read yet."""
    record = training_loop.take_place(args)
    if record.loaders:  # the script reads these files for its loader, by `iteration`
        step_record.write_loader_states(args.dataloader_save, record.step, record.loaders)


@contextlib.contextmanager
def reads_on() -> Iterator[None]:
    """Let the script of a newcomer set its data loader to the job's step, as after the load of a save."""
    from megatron.training import get_args

    args = get_args()
    load = args.load
    if getattr(args, "dataloader_save", None) and load is None:
        args.load = args.save
    try:
        yield
    finally:
        args.load = load


def take_answers() -> None:
    """Set in a newcomer what the framework would have asked other ranks; data iterators are built."""
    from megatron.training import get_args

    set_args(get_args(), context.part(Recovery).answers["asked"])
