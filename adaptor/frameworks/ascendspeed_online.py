"""Online recovery in ModelLink: its loop, called again after a finished step, and the supported jobs.

The loop reads nearly all of its state from the arguments when called. ModelLink has no version number: the
patches fit a single commit, and stop the job if a function differs. Lines are those of commit af1347
(`ascendspeed/training.py`).
"""

from __future__ import annotations

import copy
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from adaptor import context, hooks, patching, preflight
from adaptor.checkpoint import save_folder_claim
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import ProtectedState
from adaptor.context import Context
from adaptor.frameworks import ascendspeed, supported_options, training_loop
from adaptor.frameworks.megatron_online_support import of_process_groups, of_torch
from adaptor.frameworks.step_log import StepLog
from adaptor.frameworks.training_loop import Recovery, TrainingLoop, set_args
from adaptor.online import rejoin
from adaptor.online.data_rewind import DataRewind
from adaptor.online.groups import Groups
from adaptor.protection_plan import ParallelLayout
from adaptor.replica import group
from adaptor.replica.choice import ReplicaChoice

NAMES = (
    *("forward_step_func", "model", "optimizer", "lr_scheduler"),
    *("train_data_iterator", "valid_data_iterator", "config"),
)
# Options with which a step, or the start of a job, keeps something that cannot be put back.
_OPTIONS = (
    ("DDP_impl", "torch", "--DDP-impl torch keeps work of a step in torch's own buckets"),
    (
        "auto_recompute_device_size",
        None,
        "--auto-recompute-device-size measures the first steps of a process",
    ),
    (
        "distribute_checkpointed_activations",
        None,
        "--distribute-checkpointed-activations has a buffer of its own",
    ),
    ("optimized_pipeline", None, "--optimized-pipeline has not been tested with it"),
    ("is_instruction_dataset", None, "--is-instruction-dataset has not been tested with it"),
    ("adlr_autoresume", None, "--adlr-autoresume ends jobs in a way of its own"),
)


class AscendLog(StepLog):
    """The log of one rank of ModelLink, whose losses are reduced over all ranks in the forward pass."""

    def args(self) -> Any:
        from ascendspeed import get_args

        return get_args()

    def timers(self) -> Any:
        from ascendspeed import get_timers

        return get_timers()

    def joined(self, losses: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return of each loss the mean, as `train_step` has it (`training.py:807`)."""
        names = losses[0] if losses else ()
        return {
            name: sum(micro_batch_losses[name] for micro_batch_losses in losses) / len(losses)
            for name in names
        }

    def over_all_ranks(self, losses: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(losses)

    def of_optimizer(self, optimizer: Any) -> dict[str, Any]:
        return {
            "learning_rate": optimizer.param_groups[0]["lr"],
            "loss_scale": optimizer.get_loss_scale().item(),
        }


class AscendLoop(TrainingLoop):
    """ModelLink's training loop, as it was called (`online.state.Loop`).

    Args:
        train_call: the arguments of the call of `train`, by their names; the loop's iterators are replaced.
    """

    framework = "ascendspeed"
    module = "ascendspeed.training"

    def __init__(self, protected: ProtectedState, train_call: dict[str, Any]) -> None:
        train = train_call["train_data_iterator"] = _replayed(train_call["train_data_iterator"])
        # In the caller's own list: after the loop it evaluates once more.
        iterators = train_call["valid_data_iterator"]
        iterators[:] = map(_replayed, iterators)
        valid: list[DataRewind] = [iterator for iterator in iterators if iterator is not None]
        super().__init__(protected, train_call, [] if train is None else [train], valid)
        start, keep = self._start["iteration"], self._board.keep
        self.log = AscendLog(keep, self._kept, start, self.module, device=self._device)

    def settle(self, step: int) -> None:
        from ascendspeed import get_timers

        for replay in self._train:
            replay.rewind(step)
        for chunk in self._model:
            for param in chunk.parameters():
                param.grad = None
        for timer in copy.copy(get_timers()._timers).values():
            timer.reset()  # one that has begun must not begin again

    def put_back(self, record: StepRecord) -> None:
        from ascendspeed import get_timers

        super().put_back(record)
        config = self._given["config"]
        if config is not None:  # in a newcomer the loop has not set them yet (1145)
            config.grad_scale_func, config.timers = self._optimizer.scale_loss, get_timers()

    def make_tail(self, record: StepRecord) -> None:
        """See `TrainingLoop.make_tail` (1224 to 1264)."""
        training, args, train_call = importlib.import_module(self.module), self.args(), self._given
        step = record.step
        for replay in self._valid:
            replay.begin_step(step)
        if args.eval_interval and step % args.eval_interval == 0 and args.do_valid:
            for iterator in train_call["valid_data_iterator"]:
                training.evaluate_and_print_results(
                    f"iteration {step}", train_call["forward_step_func"], iterator, self._model, step, False
                )
        is_saved = bool(args.save and args.save_interval and step % args.save_interval == 0)
        state = (step, self._model, self._optimizer, self._scheduler)
        if is_saved:
            training.save_checkpoint_and_time(*state)
        ends = bool(args.exit_interval and step % args.exit_interval == 0)
        if args.exit_duration_in_mins and not ends:
            minutes = (time.time() - training._TRAIN_START_TIME) / 60.0
            exit_vote = torch.tensor([int(minutes > args.exit_duration_in_mins)], device="cpu")
            dist.all_reduce(exit_vote, dist.ReduceOp.MAX, group.of_training_job())
            ends = bool(exit_vote.item())
        if ends:
            if not is_saved:
                training.save_checkpoint_and_time(*state)
            training.print_datetime(f"exiting program at iteration {step}")
            sys.exit()

    def gather_weights(self) -> None:
        from ascendspeed import get_timers

        with torch.no_grad():
            self._optimizer._copy_main_params_to_model_params()
            self._optimizer.gather_model_params(self.args(), get_timers())


def _replayed(iterator: Any) -> DataRewind | None:
    return None if iterator is None else DataRewind(iterator)


class NewcomerData:
    """The data of a newcomer.

    Attributes:
        is_built: it is being built, and the newcomer is alone
    """

    def __init__(self, _context: Context) -> None:
        self.is_built = False


def why_not(args: Any, call: Mapping[str, Any]) -> str:
    """Return why a job of ModelLink is not recovered online; empty: the job is."""
    return of_process_groups() or of_backends() or of_options(args) or of_data(call) or of_torch()


def of_backends() -> str:
    """Return the process-group backends that are untested with ModelLink; empty: all are tested."""
    other_backends = sorted(context.part(Groups).backends - {"gloo"})
    return f"it has not been tested with ModelLink over {', '.join(other_backends)}" if other_backends else ""


def of_options(args: Any) -> str:
    """Return the first option with state that cannot be restored; empty: none."""
    for name, value, meaning in _OPTIONS:
        option_value = getattr(args, name, None)
        if option_value == value if value is not None else option_value not in (None, False, -1):
            return meaning
    return ""


def of_data(call: Mapping[str, Any]) -> str:
    """Return why the data of a call of the training loop cannot be read once more; empty: they can."""
    train, valid = call["train_data_iterator"], call["valid_data_iterator"]
    if not isinstance(valid, list):
        return f"valid_data_iterator is a {type(valid).__name__}, and no list"
    for iterator in (train, *valid):
        if iterator is not None and not hasattr(iterator, "__next__"):
            return f"there is a {type(iterator).__name__} where an iterator of data should be"
    return ""


def checks(parsed: Any) -> Iterator[Callable[[], None]]:
    """Return the checks before anything is built; each raises an AdaptorError."""
    yield from ascendspeed.checks(parsed)
    for hook in hooks.of_worker():
        yield partial(hook.require_other_loop, parsed.world_size, parsed)
    yield lambda: supported_options.take_local_copy(parsed)
    yield lambda: context.part(ReplicaChoice).decide(
        parsed.use_distributed_optimizer, ascendspeed.data_parallel_size(parsed)
    )


def examine(parsed: Any) -> None:
    """Record for the report the refusals, and the protection."""

    def layout() -> ParallelLayout:
        return ParallelLayout(
            world_size=parsed.world_size,
            data_parallel=ascendspeed.data_parallel_size(parsed),
            experts=0,
            sharded=parsed.use_distributed_optimizer,
            instances=1,
            tensor=parsed.tensor_model_parallel_size,
            may_copy=False,
        )

    preflight.examine(
        [*checks(parsed), lambda: save_folder_claim.require_possible(parsed.save)],
        layout,
        lambda: None,
        lambda: list(filter(None, (of_options(parsed),))),
    )


def train(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the framework's loop `wrapped`, and again after each incident from which the job goes on."""
    from ascendspeed import get_args

    call = {**dict(zip(NAMES, args, strict=False)), **kwargs}
    protected = ascendspeed.protected_state(call["model"], call["optimizer"], call["lr_scheduler"])

    def begin() -> None:
        if not rejoin.is_newcomer():
            patching.check("ttp")
            save_folder_claim.require_no_later_step(get_args().save, get_args().iteration)
        training_loop.begin_training(protected, get_args().iteration)

    return training_loop.train(
        lambda: why_not(get_args(), call),
        lambda: AscendLoop(protected, call),
        begin,
        lambda: wrapped(**call),
    )


def build_data(build: Callable[[], tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    """Return the result of `build`, the iterators of a newcomer's data, as on the first start."""
    from ascendspeed import get_args

    args, place = get_args(), context.part(NewcomerData)
    # For what is consumed it takes a guess by the iteration where that is 0, and asserts what need not hold.
    step, args.iteration = args.iteration, 0
    place.is_built = True
    try:
        train, valid, test = build()
    finally:
        args.iteration, place.is_built = step, False
    asked_values = context.part(Recovery).answers["asked"]
    set_args(args, asked_values)
    if train is None:  # another rank of this part of the model reads the data
        valid, test = [None] * int(asked_values["do_valid"]), [None] * int(asked_values["do_test"])
    return train, valid, test
