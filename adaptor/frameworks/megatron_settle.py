"""Clears the unfinished work of an exception in Megatron, before the training loop is called again.

Lines are those of 0.15.0rc5; the names are the same from 0.12 to main.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import os
import signal
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from adaptor import context
from adaptor.checkpoint import amax_histories, layer_wise, shards, step_record
from adaptor.frameworks.optimizer_instances import PutOff
from adaptor.replica import optimizer_state

# What routers of experts add up in the forward passes of a step. The framework zeroes it when the gradients
# are final, and saves none of it.
_SUMS = (
    "local_tokens_per_expert",  # for the expert bias
    *("global_tokens_per_expert", "ga_steps"),  # for `global_aux_loss`, since 0.15
    *("qb_beta_accum", "qb_beta_count"),  # for quantile balancing, since 0.20
)
# What the parts of a shared expert hand each other in a forward pass (--moe-shared-expert-overlap).
_OF_SHARED_EXPERTS = (
    "cached_fc1_input",
    "cached_fc2_input",
    "cached_fc2_output",
    "cached_output",
    "gate_score",
)
# The inputs that a layer of MindSpeed hands to its shared experts: the list, and its modules in two versions.
_INPUTS_OF_SHARED_EXPERTS = "AG_SHARED_EXPERTS_INPUTS"
_OVERLAPS = (
    "mindspeed.core.transformer.moe.moe_utils",
    "mindspeed.core.transformer.moe.moe_feature.overlap.moe_common",
)
# What the backward pass of the embedding is put off for (--defer-embedding-wgrad-compute).
_OF_EMBEDDING = ("embedding_activation_buffer", "grad_output_buffer")
_CORE = "megatron.core.transformer"
# What forward passes add up for the line of a step: where it is kept, which differs between versions.
_AUXILIARY_LOSSES = (
    ("megatron.core.parallel_state", "_MOE_LAYER_WISE_LOGGING_TRACKER"),
    (f"{_CORE}.moe.moe_utils", "_MOE_LAYER_WISE_LOGGING_TRACKER"),  # since 0.13
    (f"{_CORE}.moe.moe_logging", "_MOE_METRICS_TRACKER._metrics"),  # 0.20
    (f"{_CORE}.multi_token_prediction", "MTPLossLoggingHelper.tracker"),
    (f"{_CORE}.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper.tracker"),
    ("mindspeed_llm.tasks.models.transformer.dsa_indexer", "DSAIndexerLossLoggingHelper.tracker"),
)
# The modules whose writers put the results of asynchronous saves into a queue.
_WRITERS = (
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
)


def settle_core(model: Sequence[Any]) -> None:
    """Clear the chunks of the model, and Megatron-core's global objects."""
    for chunk in model:
        for bucket_group in _bucket_groups(chunk):
            _settle_bucket_group(bucket_group)
        for param in chunk.parameters():
            param.grad = None
        for module in chunk.modules():
            for name in _SUMS:
                if (added_up := module._buffers.get(name)) is not None:
                    added_up.zero_()
            _forget_parts(module)
    for name in _OVERLAPS:
        getattr(sys.modules.get(name), _INPUTS_OF_SHARED_EXPERTS, []).clear()
    forget_auxiliary_losses()
    amax_histories.forget_order(model)


def _forget_parts(module: Any) -> None:
    """Forget what the parts of a module have handed each other in the abandoned step."""
    attributes = vars(module)
    for name in _OF_SHARED_EXPERTS:
        if attributes.get(name) is not None:
            setattr(module, name, None)
    if (state := attributes.get("_overlap_state")) is not None:  # 0.20
        module._overlap_state = type(state).IDLE
    for name in _OF_EMBEDDING:
        if isinstance(put_off := attributes.get(name), list):
            put_off.clear()


def forget_auxiliary_losses() -> None:
    """Forget the sums of forward passes for the line of a step, and the groups of the sums.

    A new process has no such sums, and the collectives for the line depend on the sums.
    """
    for module, path in _AUXILIARY_LOSSES:
        auxiliary_losses: Any = sys.modules.get(module)
        for name in path.split("."):
            auxiliary_losses = getattr(auxiliary_losses, name, None)
        if auxiliary_losses is not None:
            auxiliary_losses.clear()


def settle_optimizer(optimizer: Any) -> None:
    """Forget the knowledge of a chain of optimizers about other ranks, collected in the first step (0.20:
    whether any rank has parameters with a separate norm): a new process asks, and all others answer.

    Forget the gathers that the abandoned step has put off, too: `gather_weights` gathers all parameters.
    """
    context.part(PutOff).forget()
    for chained_optimizer in {
        id(chained_optimizer): chained_optimizer
        for chained_optimizer in (
            optimizer,
            *layer_wise.parts_of(optimizer),
            *step_record.chain(optimizer),
        )
    }.values():
        if getattr(chained_optimizer, "_has_grad_norm_group_cache", None) is not None:
            chained_optimizer._has_grad_norm_group_cache = None


def abandon_async_saves(checkpointing_context: MutableMapping[str, Any] | None) -> None:
    """End the asynchronous saves of this process, and forget the plan that saves share.

    Invariant: survivors and new processes enter their next save with the same state: no pending call, call
    index 0 next, no cached plan, and an empty queue of results. Otherwise ranks would enter different
    collectives, or metadata would describe the files of another save.

    Args:
        checkpointing_context: the state that the framework keeps between saves.
    """
    queue = getattr(sys.modules.get("megatron.training.async_utils"), "_async_calls_queue", None)
    if queue is not None:
        if queue.async_calls:
            for caller in {id(call.async_caller): call.async_caller for call in queue.async_calls}.values():
                _end_async_caller(caller)
            # A persistent caller may keep a result of the call that was ended.
            for owner in (queue, type(queue)):  # the class owns it since 0.17
                for name in ("persistent_caller", "_persistent_caller"):
                    if name in vars(owner):
                        setattr(owner, name, None)
            queue.async_calls.clear()
        queue.call_idx = -1
    forget_results_of_writers()
    if checkpointing_context is not None:
        for name in ("save_strategy", "load_strategy"):
            checkpointing_context.pop(name, None)


def forget_results_of_writers() -> None:
    """Empty the queue with the results of writers: a later save would take the results for its own."""
    for name in _WRITERS:
        writers = sys.modules.get(name)
        if (results := getattr(writers, "_results_queue", None)) is not None:
            vars(writers)["_results_queue"] = results._manager.Queue()


def _end_async_caller(caller: Any) -> None:
    """Kill the writer process of a pending asynchronous save, and the writer's forked processes."""
    if caller.process is None:
        return
    if caller.process.exitcode is None:  # else the process was reaped, and another one may have its number
        pid = caller.process.pid
        os.kill(pid, signal.SIGSTOP)  # it forks no further process
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), signal.SIGKILL)
        # NVRx's writer handles SIGTERM, and is killed after 30 s without an answer.
        os.kill(pid, signal.SIGCONT)
    if "abort" in inspect.signature(caller.close).parameters:  # since 0.15
        caller.close(abort=True)
    else:
        caller.process.kill()
        caller.process = None


def gather_weights(model: Sequence[Any], optimizer: Any) -> None:
    """Make the model's weights from main params: collective, over the new groups."""
    for chained_optimizer in step_record.chain(optimizer):
        # With this option weights are gathered in the memory of gradients, and quantized behind that.
        in_gradients = getattr(
            getattr(chained_optimizer, "config", None), "reuse_grad_buf_for_mxfp8_param_ag", False
        )
        name = f"_copy_main_params_to_{'param_buffer' if in_gradients else 'model_params'}"
        storage = optimizer_state.storage_of(chained_optimizer)
        if storage is not None:
            storage.make_weights()
        elif not shards.is_stub(chained_optimizer) and hasattr(chained_optimizer, name):
            getattr(chained_optimizer, name)()
    parts = list(layer_wise.parts_of(optimizer))
    in_buffers = [part for part in parts if getattr(part, "use_buffer_param_sync", False)]
    for part in parts:
        if part not in in_buffers:
            part.allgather_params()
    if in_buffers or any(map(shards.is_sharded, step_record.chain(optimizer))):
        for chunk in model:
            chunk.start_param_sync(force_sync=True)


def _bucket_groups(chunk: Any) -> list[Any]:
    names = ("bucket_groups", "expert_parallel_bucket_groups")
    return [bucket_group for name in names for bucket_group in getattr(chunk, name, [])]


def _settle_bucket_group(bucket_group: Any) -> None:
    """Wait for broken work of the abandoned step, and forget the work: no work may write later."""
    for name in ("grad_reduce_handle", "param_gather_handle"):
        handle = getattr(bucket_group, name, None)
        if handle is not None:
            for work in handle if isinstance(handle, list) else [handle]:  # MindSpeed has one for each bucket
                with contextlib.suppress(RuntimeError):
                    work.wait()
            setattr(bucket_group, name, None)
    bucket_group.param_gather_dispatched = False
    if hasattr(bucket_group, "per_param_grad_ready_counts"):  # since 0.16 they are counted in the first batch
        bucket_group.per_param_grad_ready_counts = {}
        # In a new process the next batch is the first one, in which buckets are reduced in another order.
        bucket_group.is_first_batch = True
        bucket_group.golden_per_param_grad_ready_counts = {}
    bucket_group.reset()


def settle_globals() -> None:
    """Clear the global objects of Megatron-LM."""
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
