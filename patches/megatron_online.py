"""Megatron-LM in an online recovery: the start of a replacement process.

Armed only where TTP_ONLINE is not 0. The process builds model and data as at any start, with process groups
of its own, loads nothing, and takes the position of the job from a survivor. `training_can_be_saved` does the
rest.
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER

newcomer = patching.Unit("newcomer", framework="megatron-lm", tested=MEGATRON_SPECIFIER, group="online")
flagscale = patching.Unit("flagscale-newcomer", framework="flagscale", tested=">=0.8,<1", group="online")


@newcomer.patch(
    "megatron.training.training:setup_model_and_optimizer",
    why="a new process among survivors loads no checkpoint, and knows the step before it builds its data",
    optional=True,
)
def newcomers_load_nothing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    from adaptor.frameworks import megatron_online, training_loop
    from adaptor.online import rejoin

    if not rejoin.is_newcomer():
        return wrapped(*args, **kwargs)
    with training_loop.loads_nothing(get_args()):
        result = wrapped(*args, **kwargs)
    megatron_online.take_place(get_args())
    return result


@newcomer.patch(
    "megatron.core.optimizer:_get_param_groups",
    why="a rank with empty param groups has learned of them from others, which a new process cannot ask",
    optional=True,
)
def aligned_groups_are_noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor import context
    from adaptor.frameworks.megatron_online_support import ParamGroups

    groups = wrapped(*args, **kwargs)
    if any(not group["params"] for group in groups):
        context.part(ParamGroups).are_aligned = True
    return groups


@newcomer.patch(
    "megatron.training.training:build_train_valid_test_data_iterators",
    why="survivors do not enter the collectives about data again: one of them tells the new process",
    optional=True,
)
def newcomers_are_told_of_data(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import megatron_online
    from adaptor.online import rejoin

    if not rejoin.is_newcomer():
        return wrapped(*args, **kwargs)
    with megatron_online.reads_on():
        result = wrapped(*args, **kwargs)
    megatron_online.take_answers()
    return result


@newcomer.patch(
    "megatron.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="the log line of a step also needs the losses of a rank that dies after its update",
    optional=True,
)
def losses_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import training_loop

    forward_backward = wrapped(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        losses = forward_backward(*args, **kwargs)
        log = training_loop.log_of_this_process()
        if log is not None and not kwargs.get("forward_only"):
            log.add_losses(losses)
        return losses

    return run


@newcomer.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.get_grad_norm",
    why="the log line of a step has the gradient norm, which an exception after the update would lose",
    accepts="()",
    optional=True,
)
def norms_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import training_loop

    return training_loop.logged(
        wrapped(*args, **kwargs), lambda log, norm: log.add_norm(norm=float(norm or 0.0))
    )


@newcomer.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.count_zeros",
    why="the log line of a step has the number of zeros, which an exception after the update would lose",
    accepts="()",
    optional=True,
)
def zeros_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import training_loop

    return training_loop.logged(wrapped(*args, **kwargs), lambda log, zeros: log.add_norm(zeros=float(zeros)))


@newcomer.patch(
    "megatron.core.optimizer.optimizer:MegatronOptimizer.count_zeros",
    why="MindSpeed counts zeros in each optimizer of a chain, not in the chain",
    accepts="()",
    optional=True,
)
def zeros_of_each_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import training_loop

    return training_loop.logged(wrapped(*args, **kwargs), lambda log, zeros: log.add_zeros(float(zeros)))


@newcomer.patch(
    "megatron.core.optimizer.optimizer:ChainedOptimizer.prepare_grads",
    why="the log counts steps that are skipped for an overflow; an exception after the step would lose one",
    accepts="()",
    optional=True,
)
def overflows_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import training_loop

    return training_loop.logged(wrapped(*args, **kwargs), lambda log, overflows: log.add_overflow(overflows))


# FlagScale's copy of the loop is called by its own copies of these.
for name in ("setup_model_and_optimizer", "build_train_valid_test_data_iterators"):
    flagscale.patch_copy(f"flagscale.train.train:{name}", of=f"megatron.training.training:{name}")
