"""Repeats the first micro-batch of a step in Megatron-core, on another model replica (TTP_REPLAY_EVERY).

The holders of a shard apply a wrong gradient alike, so the twin check cannot see an error of a forward or a
backward pass. In a replay each rank repeats the first micro-batch of the rank with the same part of the model
in the previous model replica: with its data and random states, and with weights of its own. The sums of the
gradients must be equal before the update.

Invariant: a replay leaves the gradients, random states, buffers and logs of the rank as the step left them,
also if the replay raises. All ranks take part, because a replica's ranks exchange activations.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from adaptor import context
from adaptor.checkpoint import step_record
from adaptor.context import Context
from adaptor.errors import UnsupportedError
from adaptor.replica import group
from adaptor.verification.checksums import BitSum
from adaptor.verification.replay_check import ReplayCheck, ReplayRecord
from adaptor.worker import runtime

ForwardBackward = Callable[..., Any]
# Calls of the framework's configuration that would reduce gradients, gather weights or measure time.
_CALLS = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func", "timers")


class Replays:
    """The replay of the current step; a part of the context of a worker.

    Attributes:
        micro_batches: the number of micro-batches of the step that is repeated; 0: no replay runs
    """

    def __init__(self, context: Context) -> None:
        self.micro_batches = 0
        self._waits_for: Sequence[Any] | None = None  # the model, until its first backward pass is over
        self._first = ""

    def wait_for(self, model: Sequence[Any]) -> None:
        """Compute the sum of the gradients of `model` after the next backward pass."""
        self._waits_for = model

    def after_backward(self) -> None:
        """Note the end of a backward pass."""
        if self._waits_for is not None:
            self._first, self._waits_for = _sum_of(self._waits_for), None

    def take(self) -> str:
        """Return the sum of the gradients of the first micro-batch."""
        first, self._first = self._first, ""
        return first


class _Recorder:
    """An iterator of data that keeps its first item."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.first: Any = None

    def __iter__(self) -> _Recorder:
        return self

    def __next__(self) -> Any:
        item = next(self._data)
        if self.first is None:
            self.first = copy.deepcopy(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)


def require_possible(model: Sequence[Any]) -> None:
    """Refuse a job whose micro-batches cannot be repeated.

    Args:
        model: the chunks of this rank, wrapped.

    Raises:
        UnsupportedError: names the option.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    experts, tensor = mpu.get_expert_model_parallel_world_size(), mpu.get_tensor_model_parallel_world_size()
    expert_tensor = getattr(mpu, "get_expert_tensor_parallel_world_size", lambda: tensor)()
    reasons = {
        "several chunks of the model on a rank (virtual pipeline stages)": len(model) > 1,
        "a model without Megatron-core's gradient buffers": not all(
            isinstance(getattr(chunk, "buffers", None), list) for chunk in model
        ),
        "--fp8-format or --fp4-format": any(getattr(config, name, None) for name in ("fp8", "fp4")),
        "CUDA graphs": any(
            getattr(config, name, None) not in (None, False, "none")
            for name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_impl")
        ),
        "--overlap-moe-expert-parallel-comm": getattr(config, "overlap_moe_expert_parallel_comm", False),
        "--delay-wgrad-compute": getattr(config, "delay_wgrad_compute", False),
        "--defer-embedding-wgrad-compute": getattr(config, "defer_embedding_wgrad_compute", False),
        "expert parallelism with context parallelism": experts > 1
        and mpu.get_context_parallel_world_size() > 1,
        "--expert-tensor-parallel-size": experts > 1 and expert_tensor != tensor,
        "one model replica": _replicas() < 2,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedError(
                f"TTP_REPLAY_EVERY is set: with {reason} no micro-batch can be repeated; leave it out"
            )


def step(check: ReplayCheck, forward_backward: ForwardBackward, **arguments: Any) -> Any:
    """Run the forward and backward passes of a step, and a replay of the first micro-batch if one is due.

    Collective in steps with a replay.

    Args:
        check: compares the sums.
        forward_backward: the framework's schedule.
        arguments: its keyword arguments.

    Returns:
        The result of `forward_backward` for the step.

    Raises:
        RuntimeError: a rank is gone.
    """
    everyone = group.of_this_job()
    model = arguments["model"]
    model = model if isinstance(model, list) else [model]
    if (
        everyone is None
        or arguments.get("forward_only")
        or not check.begin_step(runtime.get().session.board.record().finished + 1)
        or (arguments["num_microbatches"] < 2 and _reduces_early(model))
    ):
        return forward_backward(**arguments)
    replays, tracker = context.part(Replays), _tracker()
    data = arguments["data_iterator"]
    data = data[0] if isinstance(data, list) else data
    recorder = None if data is None else _Recorder(data)
    states = step_record.take_random(tracker)
    replays.wait_for(model)
    result = forward_backward(**{**arguments, "data_iterator": recorder})
    own_sum = replays.take()

    def again(item: Any, item_states: Mapping[str, Any]) -> str:
        with _untouched(model, tracker):
            step_record.put_back_random(tracker, item_states)
            return _repeat(forward_backward, arguments, model, item)

    own_records = (None if recorder is None else recorder.first, states)
    replayer, replayed = _neighbours()
    received = pickle.loads(group.pass_on(everyone, pickle.dumps(own_records), to=replayer, source=replayed))
    record = ReplayRecord(_replica(), replayer, own_sum, again(*received))
    check.compare(record, lambda: again(*own_records))
    return result


def _repeat(forward_backward: ForwardBackward, arguments: Mapping[str, Any], model: Any, item: Any) -> str:
    """Return the sum of the gradients that `item` alone gives."""
    replays = context.part(Replays)
    for buffer in _gradient_buffers(model):
        buffer.grad_data.zero_()
        for param in buffer.params:
            param.grad_added_to_main_grad = False
    replays.micro_batches = arguments["num_microbatches"]
    try:
        data = None if item is None else iter([item])
        forward_backward(**{**arguments, "data_iterator": data, "num_microbatches": 1})
    finally:
        replays.micro_batches = 0
    return _sum_of(model)


@contextlib.contextmanager
def _untouched(model: Sequence[Any], tracker: Any) -> Iterator[None]:
    """Leave gradients, random states, buffers, configuration and logs of the model as they are."""
    from megatron.core.utils import get_model_config

    config = get_model_config(model[0])
    gradients = [(buffer, buffer.grad_data.clone()) for buffer in _gradient_buffers(model)]
    flags = [
        (param, param.grad_added_to_main_grad)
        for buffer, _ in gradients
        for param in buffer.params
        if hasattr(param, "grad_added_to_main_grad")
    ]
    calls = {name: getattr(config, name) for name in _CALLS if hasattr(config, name)}
    states = step_record.take_random(tracker)
    changed = [(values, values.clone()) for values in (*_buffers(model), *_logged_losses())]
    try:
        with contextlib.ExitStack() as stack:
            for chunk in model:  # no reduction begins after the last micro-batch
                stack.enter_context(chunk.no_sync())
            for name in calls:
                setattr(config, name, None)
            yield
    finally:
        for name, call in calls.items():
            setattr(config, name, call)
        for buffer, content in gradients:
            buffer.grad_data.copy_(content)
        for param, flag in flags:
            param.grad_added_to_main_grad = flag
        step_record.put_back_random(tracker, states)
        for values, content in changed:
            values.copy_(content)


def _buffers(model: Sequence[Any]) -> Iterator[Any]:
    for chunk in model:  # `chunk.buffers` are the gradient buffers
        yield from torch.nn.Module.buffers(chunk)


def _logged_losses() -> Iterator[Any]:
    """Yield the tensors in which layers add up losses for the log."""
    if moe := sys.modules.get("megatron.core.transformer.moe.moe_utils"):
        tracker: dict[str, Any] = getattr(moe, "get_moe_layer_wise_logging_tracker", dict)()
        yield from (entry["values"] for entry in tracker.values())
    if prediction := sys.modules.get("megatron.core.transformer.multi_token_prediction"):
        values = getattr(prediction.MTPLossLoggingHelper, "tracker", {}).get("values")
        if values is not None:
            yield values


def _gradient_buffers(model: Sequence[Any]) -> list[Any]:
    return [
        buffer
        for chunk in model
        for buffer in (*chunk.buffers, *getattr(chunk, "expert_parallel_buffers", ()))
    ]


def _sum_of(model: Sequence[Any]) -> str:
    bits = BitSum()
    for buffer in _gradient_buffers(model):
        bits.add(buffer.grad_data)
    return bits.value()


def _reduces_early(model: Sequence[Any]) -> bool:
    """Return True if gradients are reduced during the last backward pass, which may be the first one."""
    return any(chunk.ddp_config.overlap_grad_reduce for chunk in model)


def _tracker() -> Any:
    from megatron.core import tensor_parallel

    return tensor_parallel.get_cuda_rng_tracker()


def _replicas() -> int:
    """Return the number of groups of ranks that compute the same gradients for the same micro-batches."""
    from megatron.core import parallel_state as mpu

    size: int = mpu.get_data_parallel_world_size() // mpu.get_expert_model_parallel_world_size()
    return size


def _replica() -> int:
    """Return the number of this rank's model replica; the ranks of expert parallelism are in one replica."""
    from megatron.core import parallel_state as mpu

    number: int = mpu.get_data_parallel_rank() // mpu.get_expert_model_parallel_world_size()
    return number


def _neighbours() -> tuple[int, int]:
    """Return the ranks in the next and the previous model replica with the same part of the model."""
    from megatron.core import parallel_state as mpu

    ranks = dist.get_process_group_ranks(mpu.get_data_parallel_group())
    place, step = mpu.get_data_parallel_rank(), mpu.get_expert_model_parallel_world_size()
    return ranks[(place + step) % len(ranks)], ranks[place - step]
