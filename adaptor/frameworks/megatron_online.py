"""Online recovery in Megatron-LM: its training loop is called again, from the end of a finished step.

The loop reads from the arguments where it is when it is called, so they are set to the step first. An
exception leaves more than that half done, and what the loop asserts when it is called is named here. Lines
are those of 0.15.0rc5; the names are the same from 0.12 to main.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptor import context
from adaptor.checkpoint import shards, step_record
from adaptor.checkpoint.step_record import StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.checkpoint.training_state import FLOPS
from adaptor.context import Context
from adaptor.frameworks import megatron_lm
from adaptor.online import groups, rejoin
from adaptor.online.groups import Groups
from adaptor.online.replay import STEPS, Replay
from adaptor.replica import group

# What the loop sets in the config of the model when it is called, and asserts that nobody has (2036 to 2060).
_CONFIG = (
    "no_sync_func",
    "grad_sync_func",
    "param_sync_func",
    "grad_scale_func",
    "finalize_model_grads_func",
    "timers",
)
# What the framework finds out by asking other ranks before its loop, and keeps in its arguments.
_ASKED = ("do_train", "do_valid", "do_test", "eval_iters")
# What the loop reads of its arguments when it is called, and which are those of the start of the job else.
_START = ("iteration", "num_floating_point_operations_so_far")
_NAMES = (
    *("forward_step_func", "model", "optimizer", "opt_param_scheduler"),
    *("train_data_iterator", "valid_data_iterator", "process_non_loss_data_func"),
    *("config", "checkpointing_context", "non_loss_data_func"),
)
# What a step, and the evaluation behind it, count on.
_CONSUMED = ("consumed_train_samples", "consumed_valid_samples")


class MegatronLoop:
    """Megatron-LM's training loop, as it was called (`rejoin.Loop`).

    Args:
        args, kwargs: of the call of `train`.

    everyone  the adaptor's group of all ranks
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        from megatron.training import get_args

        given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
        self._model: Sequence[Any] = given["model"]
        self._optimizer = given["optimizer"]
        self._scheduler = given["opt_param_scheduler"]
        self._given = given
        self._replays = _replayed(given["train_data_iterator"])
        self._valid = _replayed(given.get("valid_data_iterator"))
        config = self._config = given.get("config")
        self._config_before = {name: getattr(config, name) for name in _CONFIG if hasattr(config, name)}
        told = context.part(Recovery).answers
        self._start = told.get("start") or {name: getattr(get_args(), name) for name in _START}
        self._is_set = False  # for a call of the loop that has not come to its first step
        self._behind = Behind(**told["behind"]) if "behind" in told else None  # in a newcomer
        self._begun = 0  # the newest step
        self._before: dict[int, dict[str, int]] = {}  # what was consumed before the last steps, by step
        self._left: int | None = None  # the step behind which something is to be done
        self._record: StepRecord | None = None
        self.everyone: dist.ProcessGroup | None = None

    def group(self) -> str:
        from pathlib import Path

        from megatron.training.checkpointing import get_checkpoint_name

        return Path(get_checkpoint_name("", 0)).parent.name

    def optimizer(self) -> Any:
        return self._optimizer

    def model(self) -> Any:
        return self._model

    def answers(self, step: int) -> Mapping[str, Any]:
        from megatron.training import get_args

        args = get_args()
        asked = {name: getattr(args, name) for name in _ASKED if hasattr(args, name)}
        read = [replay.given_in(step) for replay in self._valid]
        behind = Behind(step, self._before.get(step, {}), read)
        return {"asked": asked, "start": self._start, "behind": behind._asdict()}

    def begin_step(self, step: int) -> None:
        """`step` begins: the loop has read what was set for it alone."""
        from megatron.training import get_args

        self._begun = step
        kept = {one: count for one, count in self._before.items() if one > step - STEPS}
        self._before = {**kept, step: {name: getattr(get_args(), name) for name in _CONSUMED}}
        for one in (*self._replays, *self._valid):
            one.begin_step(step)
        if self._is_set:
            _set(self._start)
            self._is_set = False

    def settle(self, step: int) -> None:
        for one in self._replays:
            one.rewind(step)
        for chunk in self._model:
            for bucket_group in _bucket_groups(chunk):
                _settle_bucket_group(bucket_group)
            for param in chunk.parameters():
                param.grad = None
        for name, value in self._config_before.items():
            setattr(self._config, name, value)
        _settle_globals()

    def trainee(self, record: StepRecord) -> MegatronTrainee:
        return megatron_lm.trainee(
            self._model,
            self._optimizer,
            self._scheduler,
            record.counters.get(FLOPS, 0),
            rerun=True,
            everyone=self.everyone,
        )

    def agree(self, step: int) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:  # it has done nothing, and knows from its twin what had been read before
            self._before = {step: dict(behind.before)} if behind.before else {}
        is_done = behind is not None or self._begun > step or step not in self._before
        told = torch.tensor([int(is_done)])
        dist.all_reduce(told, dist.ReduceOp.MIN, self.everyone)
        self._left = None if told.item() else step
        if self._left is not None:
            self._begun = step
        elif behind is not None:  # another incident may come before its next step
            self._begun = step + 1
        for number, one in enumerate(self._valid):
            if behind is None:
                one.rewind(step if self._left is None else step - 1)
            elif self._left is None and behind.before:
                one.begin_step(step)
                for _ in range(behind.read[number]):
                    next(one)

    def put_back(self, record: StepRecord) -> None:
        from megatron.training import get_args

        args = get_args()
        self._record = record
        _set({name: value for name, value in record.counters.items() if name != FLOPS})
        self._set_loop(record)
        consumed = args.consumed_train_samples
        if self._left is not None:  # where the size of batches grows then, the loop saves
            consumed = self._before[record.step]["consumed_train_samples"]
            _set({"consumed_valid_samples": self._before[record.step]["consumed_valid_samples"]})
        _calculator().update_num_microbatches(consumed, consistency_check=False)
        if getattr(args, "overlap_param_gather", False):
            for chunk in self._model:  # the loop disables them first (2148)
                if not getattr(chunk, "remove_forward_pre_hook_handles", True):
                    chunk.enable_forward_pre_hook()

    def _set_loop(self, record: StepRecord) -> None:
        """Set what the loop reads when it is called."""
        self._is_set = True
        _set({"iteration": record.step, "curr_iteration": record.step})
        if FLOPS in record.counters:
            _set({FLOPS: record.counters[FLOPS]})

    def finish_step(self) -> None:
        from megatron.training import get_args, get_timers

        step, self._left, record = self._left, None, self._record
        if step is None:
            return
        assert record is not None
        training, args, given = importlib.import_module("megatron.training.training"), get_args(), self._given
        _set({**self._start, "curr_iteration": step - 1})
        if importlib.util.find_spec("megatron.core.rerun_state_machine") is not None:
            from megatron.core.rerun_state_machine import get_rerun_state_machine

            get_rerun_state_machine().current_iteration = step
        for one in self._valid:
            one.begin_step(step)
        if args.do_valid and args.eval_interval and step % args.eval_interval == 0:
            hooked = training.should_disable_forward_pre_hook(args)
            if hooked:
                training.disable_forward_pre_hook(self._model)
            training.evaluate_and_print_results(
                f"iteration {step}",
                given["forward_step_func"],
                given["valid_data_iterator"],
                self._model,
                step,
                given["process_non_loss_data_func"],
                self._config,
                verbose=False,
                write_to_tensorboard=True,
                non_loss_data_func=given.get("non_loss_data_func"),
            )
            if hooked:
                training.enable_forward_pre_hook(self._model)
        # The loop lets it run, and the save stops it and starts it again.
        timer = get_timers()("interval-time", log_level=0)
        timer.start()
        ends = training.checkpoint_and_decide_exit(
            self._model,
            self._optimizer,
            self._scheduler,
            step,
            record.counters.get(FLOPS, 0),
            given["checkpointing_context"],
            given["train_data_iterator"],
        )
        timer.reset()
        if ends:
            sys.exit(0)
        self._set_loop(record)

    def gather_weights(self) -> None:
        for one in step_record.chain(self._optimizer):
            if not shards.is_stub(one) and hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
        if any(map(shards.is_sharded, step_record.chain(self._optimizer))):
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)


class Behind(NamedTuple):
    """What a newcomer is told of the step that it joins at.

    before  what was consumed before it; empty: it was not begun in the process that tells
    read    how often each iterator of validation data was read behind it
    """

    step: int
    before: dict[str, int]
    read: list[int]


class Recovery:
    """Online recovery in a process that runs Megatron-LM.

    loop     its training loop, once that was called
    answers  in a newcomer: what the framework would have asked other ranks at its start
    """

    def __init__(self, _context: Context) -> None:
        self.loop: MegatronLoop | None = None
        self.answers: dict[str, dict[str, Any]] = {}


def train(wrapped: Callable[..., Any], args: Any, kwargs: Any, begin: Callable[[], None]) -> Any:
    """Call the framework's loop `wrapped`, and again after each incident from which the job goes on.

    Args:
        begin: describes what this rank holds and lets training begin; not called in a newcomer.
    """
    worker = rejoin.of_this_process()
    assert worker is not None
    from megatron.training import get_args

    loop = context.part(Recovery).loop = MegatronLoop(args, kwargs)
    worker.decide(why_not(get_args()))
    if worker.newcomer:
        loop.everyone = group.of_everyone()  # in its place among the groups of the job
    else:
        begin()
        loop.everyone = group.of_this_job()
    return worker.run(loop, lambda: wrapped(*args, **kwargs))


def begin_step(step: int) -> None:
    """`step` begins in a loop that may be called again."""
    loop = context.part(Recovery).loop
    if loop is not None:
        loop.begin_step(step)


def is_newcomer() -> bool:
    """Return whether this process takes the place of another, and has not joined yet."""
    worker = rejoin.of_this_process()
    return worker is not None and worker.newcomer


def why_not(args: Any) -> str:
    """Return why a job with these arguments is not recovered online; empty: it is."""
    for name, meaning in (
        ("tp_comm_overlap", "--tp-comm-overlap has buffers of its own between ranks"),
        ("enable_cuda_graph", "CUDA graphs hold the groups of the start"),
        ("external_cuda_graph", "CUDA graphs hold the groups of the start"),
        ("use_nccl_ub", "NCCL's user buffers are registered with the groups of the start"),
        ("nccl_ub", "NCCL's user buffers are registered with the groups of the start"),
        ("use_sharp", "SHARP is bound to the groups of the start"),
        ("async_save", "an asynchronous save holds groups of the start"),
        ("perform_rl_step", "reinforcement learning has loops of its own"),
    ):
        if getattr(args, name, False):
            return meaning
    backend = str(dist.get_backend())
    if backend != "gloo":
        return f"process groups over {backend} were not exchanged on a device yet"
    if not context.part(Groups).known:
        return "this torch makes process groups in a way that is not known"
    return groups.why_not()


@contextlib.contextmanager
def loads_nothing(args: Any) -> Iterator[None]:
    """While a newcomer builds its model: no checkpoint is read, its state comes from the survivors."""
    names = [name for name in ("load", "pretrained_checkpoint") if hasattr(args, name)]
    before = {name: getattr(args, name) for name in names}
    for name in names:
        setattr(args, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def take_place(args: Any) -> None:
    """Set a newcomer to the step of the job; model and optimizer are built, and no data is read yet."""
    worker = rejoin.of_this_process()
    assert worker is not None
    record, answers, _ = worker.ask_record()
    _set(record.counters)
    _set({"iteration": record.step})
    context.part(Recovery).answers.update(answers)
    if before := answers["behind"]["before"]:  # its data begins there, with an evaluation that may come again
        _set({"iteration": record.step - 1, "consumed_valid_samples": before["consumed_valid_samples"]})


def take_answers() -> None:
    """Set in a newcomer what the framework would have asked other ranks; data iterators are built."""
    _set(context.part(Recovery).answers["asked"])


def _set(values: Mapping[str, Any]) -> None:
    from megatron.training import get_args

    args = get_args()
    for name, value in values.items():
        setattr(args, name, value)


def _replayed(iterators: Any) -> list[Replay]:
    """Put a `Replay` below the framework's own iterators, which keep what they read of one step alone."""
    found: list[Replay] = []
    for one in iterators if isinstance(iterators, list) else [iterators]:
        if one is not None and hasattr(one, "iterable"):
            replay = Replay(one.iterable)
            one.iterable = replay
            found.append(replay)
    return found


def _bucket_groups(chunk: Any) -> list[Any]:
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [one for name in names for one in getattr(chunk, name, [])]


def _settle_bucket_group(one: Any) -> None:
    """Wait for broken work of the abandoned step, and forget it: nothing of it may write later."""
    for name in ("grad_reduce_handle", "param_gather_handle"):
        handle = getattr(one, name, None)
        if handle is not None:
            with contextlib.suppress(RuntimeError):
                handle.wait()
            setattr(one, name, None)
    one.param_gather_dispatched = False
    if hasattr(one, "per_param_grad_ready_counts"):  # since 0.16 they are counted in the first batch
        one.per_param_grad_ready_counts = {}
    one.reset()


def _settle_globals() -> None:
    from megatron.training import get_args, get_timers

    for timer in copy.copy(getattr(get_timers(), "_timers", {})).values():
        timer.reset()
    if importlib.util.find_spec("megatron.core.rerun_state_machine") is not None:
        from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

        machine = get_rerun_state_machine()
        machine.state = RerunState.NOT_RUNNING_YET
        # An evaluation switches it off until its end, which an exception has left out. A rank on which it is
        # on asks all others in each step whether to run that again.
        machine.set_mode(RerunMode(get_args().rerun_mode))
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "clear_aux_losses_tracker"):
        moe_utils.clear_aux_losses_tracker()


def _calculator() -> Any:
    core = importlib.util.find_spec("megatron.core.num_microbatches_calculator")
    return importlib.import_module(core.name if core else "megatron.training.global_vars")
