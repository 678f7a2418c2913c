"""Megatron-core: second copies of optimizer shards, and the optimizer's own step hooks as the door.

Both in one unit: replicas without the door, or the door without replicas, would break the promise. A unit of
its own lets another model replica repeat a micro-batch (TTP_REPLAY_EVERY).
"""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.errors import UnsupportedError
from adaptor.frameworks import optimizer_instances, state_comparison
from adaptor.frameworks.optimizer_instances import INSTANCES
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER, SINCE_0_7
from adaptor.replica.choice import ReplicaChoice
from adaptor.worker import runtime

optimizer = patching.Unit(
    "optimizer",
    framework="megatron-core",
    tested=MEGATRON_SPECIFIER,
    version="megatron.core.package_info:__version__",
)


@optimizer.patch(
    "megatron.core.parallel_state:initialize_model_parallel",
    why="with split replicas the data-parallel group is cut in two, each half with the whole optimizer state",
    accepts="(tensor_model_parallel_size=, pipeline_model_parallel_size=, ...)",
)
def data_parallel_groups_are_split(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    import inspect

    import torch

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    call_arguments = call.arguments
    world, stages = torch.distributed.get_world_size(), call_arguments["pipeline_model_parallel_size"]
    tensor = call_arguments["tensor_model_parallel_size"]
    experts = call_arguments["expert_model_parallel_size"] * (
        call_arguments.get("expert_tensor_parallel_size") or tensor
    )
    choice = context.part(ReplicaChoice)
    if not choice.is_decided:  # else the framework's arguments have told more
        choice.cannot_split(optimizer_instances.wrong_in_framework())
    instances = choice.instances(
        world // (tensor * stages), call_arguments.get(INSTANCES, 1), world // (experts * stages)
    )
    if INSTANCES in call_arguments:
        call_arguments[INSTANCES] = instances
    return wrapped(*call.args, **call.kwargs)


@optimizer.patch(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    why="gradients are reduced over both halves, each of which then updates its own shards",
    accepts=(
        "(config, ddp_config, module, ...)",
        "(config, module, data_parallel_group, ...)",  # 0.6, which has no config of its own for it
    ),
)
def gradients_reach_both_instances(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.core import parallel_state

    ddp_config = kwargs.get("ddp_config", args[1] if len(args) > 1 else None)
    if not hasattr(ddp_config, INSTANCES):
        return wrapped(*args, **kwargs)
    optimizer_instances.require_groups()
    size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    instances = size // parallel_state.get_data_parallel_world_size(
        with_context_parallel=True, partial_data_parallel=True
    )
    if ddp_config.use_distributed_optimizer:
        choice = context.part(ReplicaChoice)
        choice.require_instances(size, instances)
        # A loop of one's own says it only here. In its pipeline all stages reduce as their gradients become
        # ready, unless it says otherwise; and what it has asked the framework for itself, it gets.
        requested_instances = getattr(ddp_config, INSTANCES)
        if instances > 1 and requested_instances == 1 and not choice.is_decided:
            stages = parallel_state.get_pipeline_model_parallel_world_size()
            if reason := optimizer_instances.wrong_with_options(ddp_config, stages, aligned=False):
                raise UnsupportedError(f"{reason}: set TTP_REPLICA=mirror")
        ddp_config.num_distributed_optimizer_instances = instances
        return wrapped(*args, **kwargs)
    if instances == 1:
        return wrapped(*args, **kwargs)
    # The groups were made before: in a loop of one's own nobody has said then that each rank will have the
    # whole optimizer. The framework would reduce its gradients over one half alone.
    half = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    with optimizer_instances.whole_groups():
        result = wrapped(*args, **kwargs)
    if any(buffer.data_parallel_group is half for buffer in instance.buffers):
        raise UnsupportedError(
            "the optimizer is not distributed, and this version of Megatron-core would reduce its gradients "
            "over half of the ranks: set TTP_REPLICA=none; nothing is lost, because each rank has all of it"
        )
    return result


@optimizer.patch(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.start_param_sync",
    why="the update of a chain of optimizers needs no other rank until all of them are done",
    accepts="(*unused, force_sync=, ...)",
    optional=True,  # since 0.9
)
def parameters_are_gathered_at_the_end(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    call = (args, kwargs)
    if runtime.get().session.window.is_open:
        put_off = context.part(optimizer_instances.PutOff).calls.setdefault(instance, [])
        if call not in put_off:
            put_off.append(call)
        return None
    context.part(optimizer_instances.PutOff).catch_up()
    # The last optimizer of the chain gathers what the others would have; in MindSpeed those of experts, for
    # which there is an argument, gather theirs alone, and so do the others.
    for put_off_call in context.part(optimizer_instances.PutOff).calls.pop(instance, []):
        if put_off_call != call:
            wrapped(*put_off_call[0], **put_off_call[1])
    return wrapped(*args, **kwargs)


@optimizer.patch(
    "megatron.core.optimizer.layer_wise_optimizer:"
    "LayerWiseDistributedOptimizer.start_param_sync_for_bucket_group_subset",
    why="a layer-wise optimizer of a chain gathers its parameters once the whole chain is updated",
    accepts="()",
    optional=True,  # since 0.18
)
@optimizer.patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.start_param_sync_for_bucket_group_subset",
    why="a distributed optimizer of a chain gathers its parameters once the whole chain is updated",
    accepts="()",
    optional=True,  # since 0.18
)
def parameters_of_one_optimizer_are_gathered_at_the_end(
    wrapped: Any, instance: Any, args: Any, kwargs: Any
) -> Any:
    put_off = context.part(optimizer_instances.PutOff)
    if runtime.get().session.window.is_open:
        put_off.further.append(wrapped)
        return None
    put_off.catch_up()
    return wrapped(*args, **kwargs)


@optimizer.patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
    why="quantized parameters compare their largest elements over all ranks once the whole chain is updated",
    accepts="()",
    optional=True,
)
def parameters_are_quantized_at_the_end(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    import torch

    buffers = getattr(instance, "buffers", ())
    if not any(getattr(buffer, "param_dtype", None) == torch.uint8 for buffer in buffers):
        return wrapped(*args, **kwargs)
    if runtime.get().session.window.is_open:
        context.part(optimizer_instances.PutOff).further.append(wrapped)
        return None
    context.part(optimizer_instances.PutOff).catch_up()
    return wrapped(*args, **kwargs)


@optimizer.patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_zero",
    why="main params on the host, and weights that the framework has updated for a trial, are loaded, too",
    accepts="(state_dict, ...)",
    optional=True,
)
@optimizer.patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_parameter_state_from_dp_reshardable",
    why="main params on the host, and weights that the framework has updated for a trial, are loaded, too",
    accepts="(state_dict, ...)",
    optional=True,
)
def main_params_on_the_host_are_loaded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = wrapped(*args, **kwargs)
    if hasattr(instance.optimizer, "_sync_hdo_state_to_sub_optimizers"):
        from adaptor.replica import optimizer_state  # torch, which is for the script to import

        instance.optimizer._sync_hdo_state_to_sub_optimizers()
        if (storage := optimizer_state.storage_of(instance)) is not None:
            storage.make_weights()
    return result


@optimizer.patch(
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._set_main_param_and_optimizer_states",
    why="main params that Transformer Engine keeps in its optimizer are loaded as it takes them",
    accepts="(model_param, tensors)",
    optional=True,
)
def main_params_of_transformer_engine_are_loaded(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks.master_params import MasterParams  # torch, which is for the script to import
    from adaptor.replica import optimizer_state

    storage = optimizer_state.storage_of(instance)
    if not isinstance(storage, MasterParams):
        return wrapped(*args, **kwargs)
    call = {**dict(zip(("model_param", "tensors"), args, strict=False)), **kwargs}
    return wrapped(call["model_param"], storage.loadable(call["tensors"]))


@optimizer.patch(
    "megatron.core.optimizer:get_megatron_optimizer",
    why="the inner optimizers' step hooks open and close the update window",
    accepts="(config, model_chunks, ...)",
)
def updates_pass_the_door(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    optimizer = wrapped(*args, **kwargs)
    optimizer_instances.let_pass_the_door(optimizer)
    return optimizer


@optimizer.patch(
    "megatron.core.optimizer.muon:get_megatron_muon_optimizer",
    why="up to 0.17 Muon's optimizers are not made by get_megatron_optimizer",
    optional=True,
)
def updates_of_muon_pass_the_door(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return updates_pass_the_door(wrapped, instance, args, kwargs)


@optimizer.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step_with_ready_grads",
    why="a rank whose parameters are all frozen has no inner optimizer that would take it through the door",
    accepts="()",
    optional=SINCE_0_7,
)
def ranks_that_train_nothing_pass_the_door(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.checkpoint import step_record

    put_off, window = context.part(optimizer_instances.PutOff), runtime.get().session.window
    if not window.is_open:  # a chain may be a part of another one
        put_off.forget()  # of a step that was abandoned
    if not step_record.inner(instance):
        runtime.get().session.update_nothing()
    result = wrapped(*args, **kwargs)
    if not window.is_open:
        put_off.catch_up()
    return result


@optimizer.patch(
    "megatron.core.optimizer.optimizer:MixedPrecisionOptimizer.step",
    why="older versions have a single optimizer without a chain",
    accepts="()",
)
@optimizer.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.step",
    why="a step that is skipped for an overflow finishes without an update",
    accepts="()",
)
def skipped_steps_are_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.checkpoint import step_record

    updated, grad_norm, zeros = wrapped(*args, **kwargs)
    runtime.get().session.end_update(bool(updated), grad_norm, step_record.inner(instance))
    return updated, grad_norm, zeros


@optimizer.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.save_parameter_state",
    why="both instances would write the same file at the same time",
    accepts="(filename)",
)
def one_instance_writes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if any(getattr(inner, "distributed_optimizer_instance_id", 0) for inner in instance.chained_optimizers):
        return None
    return wrapped(*args, **kwargs)


replay = patching.Unit("replay", framework="megatron-core", tested=MEGATRON_SPECIFIER)


@replay.patch(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="a wrong gradient is found before the update, by another rank that computes it again",
    optional=True,
)
def micro_batches_are_repeated(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return state_comparison.with_replays(wrapped(*args, **kwargs))


@replay.patch(
    "megatron.core.pipeline_parallel.schedules:backward_step",
    why="after the first backward pass the buffers have the gradients of one micro-batch; the pass is timed",
    optional=True,
)
def gradients_are_summed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    result = _timed(wrapped, args, kwargs)
    if context.get().settings.replay_every:
        from adaptor.frameworks.megatron_replay import Replays  # torch, which is for the script to import

        context.part(Replays).after_backward()
    return result


@replay.patch(
    "megatron.core.pipeline_parallel.schedules:forward_step",
    why="a repeated micro-batch has the share in the loss that it had in its step; time and tokens count",
    accepts="(forward_step_func, data_iterator, model, num_microbatches, ...)",
    optional=True,
)
def losses_are_divided_alike(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if context.get().settings.replay_every:
        from adaptor.frameworks.megatron_replay import Replays

        if number := context.part(Replays).micro_batches:
            if "num_microbatches" in kwargs:
                kwargs = {**kwargs, "num_microbatches": number}
            else:
                args = (*args[:3], number, *args[4:])
    worker = runtime.of_this_process()
    if args and isinstance(worker, runtime.Runtime):
        args = (worker.session.pace.counting_tokens(args[0]), *args[1:])
    return _timed(wrapped, args, kwargs)


def _timed(wrapped: Any, args: Any, kwargs: Any) -> Any:
    """Call a forward or backward pass, and count its seconds for the search of a slow rank."""
    worker = runtime.of_this_process()
    if not isinstance(worker, runtime.Runtime):
        return wrapped(*args, **kwargs)
    return worker.session.pace.compute(lambda: wrapped(*args, **kwargs))
