"""ModelLink's `ascendspeed`: second copies of optimizer shards, and the door.

Both are one unit, for the reason in `megatron_core`.
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.frameworks.tested_versions import MODELLINK
from adaptor.worker import runtime

optimizer = patching.Unit("ascendspeed-optimizer", framework="ascendspeed", tested=MODELLINK)

_CLASS = "ascendspeed.optimizer.distrib_optimizer:DistributedOptimizer"


def _halves() -> Any:
    """The module of the halves of the data-parallel group, if the group is cut; else None."""
    from adaptor.frameworks import ascendspeed_shards

    return ascendspeed_shards if ascendspeed_shards.half() else None


@optimizer.patch(
    "ascendspeed.core.parallel_state:initialize_model_parallel",
    why="with split replicas the data-parallel group is cut in two, each half with the whole optimizer state",
    accepts="(tensor_model_parallel_size=, pipeline_model_parallel_size=, ...)",
)
def data_parallel_groups_are_cut(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    import inspect

    from adaptor.frameworks import ascendspeed_shards

    call = inspect.signature(wrapped).bind(*args, **kwargs)
    call.apply_defaults()
    result = wrapped(*args, **kwargs)
    call_arguments = call.arguments
    ascendspeed_shards.cut(
        call_arguments["tensor_model_parallel_size"], call_arguments["pipeline_model_parallel_size"]
    )
    return result


@optimizer.patch(
    f"{_CLASS}.build_model_gbuf_range",
    why="the shards of a half are twice as large",
    accepts="(model, dtype)",
)
def shards_are_those_of_a_half(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    halves = _halves()
    return halves.ranges(instance, *args, **kwargs) if halves else wrapped(*args, **kwargs)


@optimizer.patch(
    f"{_CLASS}.reduce_model_grads",
    why="gradients are reduced over both halves, each of which then updates its own shards",
    accepts="(args, timers)",
)
def gradients_reach_both_halves(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    halves = _halves()
    if not halves:
        return wrapped(*args, **kwargs)
    halves.halve(instance)
    with halves.half_as_data_parallel_group():
        wrapped(*args, **kwargs)
        halves.add_twins(instance)
    return None


@optimizer.patch(
    f"{_CLASS}.gather_model_params",
    why="each half gathers all parameters from its own ranks",
    accepts="(args, timers)",
)
@optimizer.patch(
    "ascendspeed.optimizer.optimizer:MegatronOptimizer.clip_grad_norm",
    why="both halves hold the whole gradient: a sum over both would count each element twice",
    accepts="(clip_grad)",
)
@optimizer.patch(
    f"{_CLASS}.load_parameter_state",
    why="each half reads the parameter state and cuts it into its own shards",
    accepts="(filename, iteration)",
)
def a_half_is_the_group(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    halves = _halves()
    if not halves:
        return wrapped(*args, **kwargs)
    with halves.half_as_data_parallel_group():
        return wrapped(*args, **kwargs)


@optimizer.patch(
    f"{_CLASS}.save_parameter_state",
    why="both halves would write the same file at the same time",
    accepts="(filename)",
)
def one_half_writes(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    halves = _halves()
    if halves and not halves.half().first:
        return None
    return a_half_is_the_group(wrapped, instance, args, kwargs)


@optimizer.patch(
    "ascendspeed.optimizer.optimizer:MegatronOptimizer.count_zeros",
    why="the function sums over all ranks, and both halves have every gradient: zeros would count twice",
    accepts="()",
)
def zeros_are_counted_once(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.online import rejoin  # torch, which is for the script to import

    halves = _halves()
    zeros = wrapped(*args, **kwargs) / halves.HALVES if halves else wrapped(*args, **kwargs)
    if rejoin.of_this_process() is not None:
        from adaptor.frameworks import training_loop

        if (log := training_loop.log_of_this_process()) is not None:
            log.add_norm(zeros=float(zeros))
    return zeros


@optimizer.patch(
    "ascendspeed.optimizer:get_megatron_optimizer",
    why="the inner optimizer's step hooks open and close the update window",
    accepts="(model)",
)
def updates_pass_the_door(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import ascendspeed_shards

    inner_result = wrapped(*args, **kwargs)
    if hasattr(inner_result, "model_gbuf_ranges"):
        ascendspeed_shards.describe(inner_result)
    session = runtime.get().session
    inner_result.optimizer.register_step_pre_hook(
        lambda inner_optimizer, *_: session.before_update(inner_optimizer)
    )
    inner_result.optimizer.register_step_post_hook(
        lambda inner_optimizer, *_: session.after_update(inner_optimizer)
    )
    return inner_result


@optimizer.patch(
    "ascendspeed.optimizer.optimizer:Float16OptimizerWithFloat16Params.step",
    why="a step that is skipped finishes without an update; here the optimizer is not distributed",
    accepts="(args, timers)",
)
@optimizer.patch(
    "ascendspeed.optimizer.optimizer:MixedPrecisionOptimizer.step",
    why="a step that is skipped for an overflow finishes without an update",
    accepts="(args, timers)",
)
def skipped_steps_are_known(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    updated, grad_norm, zeros = wrapped(*args, **kwargs)
    runtime.get().session.end_update(bool(updated), grad_norm, [instance.optimizer])
    return updated, grad_norm, zeros
