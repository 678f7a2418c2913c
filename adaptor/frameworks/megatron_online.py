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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
from adaptor.online.replay import Replay
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
_NAMES = ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator")


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
        self._replays = _replayed(given["train_data_iterator"])
        config = kwargs.get("config", args[7] if len(args) > 7 else None)
        self._config = config
        self._config_before = {name: getattr(config, name) for name in _CONFIG if hasattr(config, name)}
        told = context.part(Recovery).answers.get("start")
        self._start = told or {name: getattr(get_args(), name) for name in _START}
        self._is_set = False  # for a call of the loop that has not come to its first step
        self.everyone: dist.ProcessGroup | None = None

    def group(self) -> str:
        from pathlib import Path

        from megatron.training.checkpointing import get_checkpoint_name

        return Path(get_checkpoint_name("", 0)).parent.name

    def optimizer(self) -> Any:
        return self._optimizer

    def model(self) -> Any:
        return self._model

    def answers(self) -> Mapping[str, Any]:
        from megatron.training import get_args

        args = get_args()
        asked = {name: getattr(args, name) for name in _ASKED if hasattr(args, name)}
        return {"asked": asked, "start": self._start}

    def begin_step(self, step: int) -> None:
        """`step` begins: the loop has read what was set for it alone."""
        for replay in self._replays:
            replay.begin_step(step)
        if self._is_set:
            _set(self._start)
            self._is_set = False

    def settle(self, step: int) -> None:
        for replay in self._replays:
            replay.rewind(step)
        for chunk in self._model:
            for one in _bucket_groups(chunk):
                _settle_bucket_group(one)
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

    def put_back(self, record: StepRecord) -> None:
        from megatron.training import get_args

        args = get_args()
        self._is_set = True
        _set({name: value for name, value in record.counters.items() if name != FLOPS})
        _set({"iteration": record.step, "curr_iteration": record.step})
        if FLOPS in record.counters:
            _set({FLOPS: record.counters[FLOPS]})
        _calculator().update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        if getattr(args, "overlap_param_gather", False):
            for chunk in self._model:  # the loop disables them first (2148)
                if not getattr(chunk, "remove_forward_pre_hook_handles", True):
                    chunk.enable_forward_pre_hook()

    def gather_weights(self) -> None:
        for one in step_record.chain(self._optimizer):
            if not shards.is_stub(one) and hasattr(one, "_copy_main_params_to_model_params"):
                one._copy_main_params_to_model_params()
        if any(map(shards.is_sharded, step_record.chain(self._optimizer))):
            for chunk in self._model:
                chunk.start_param_sync(force_sync=True)


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
    record, answers = worker.ask_record()
    _set(record.counters)
    _set({"iteration": record.step})
    context.part(Recovery).answers.update(answers)


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
    found = []
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
    from megatron.training import get_timers

    for timer in copy.copy(getattr(get_timers(), "_timers", {})).values():
        timer.reset()
    if importlib.util.find_spec("megatron.core.rerun_state_machine") is not None:
        from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

        get_rerun_state_machine().state = RerunState.NOT_RUNNING_YET
    from megatron.core.transformer.moe import moe_utils

    if hasattr(moe_utils, "clear_aux_losses_tracker"):
        moe_utils.clear_aux_losses_tracker()


def _calculator() -> Any:
    core = importlib.util.find_spec("megatron.core.num_microbatches_calculator")
    return importlib.import_module(core.name if core else "megatron.training.global_vars")
