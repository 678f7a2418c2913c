"""ModelLink in an online recovery: the start of a newcomer, and the data kept for its log.

As `megatron_online`, armed only where TTP_ONLINE is not 0.
"""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.frameworks.tested_versions import MODELLINK
from adaptor.patches.megatron_online import norms_are_kept, overflows_are_kept

newcomer = patching.Unit("ascendspeed-newcomer", framework="ascendspeed", tested=MODELLINK, group="online")


@newcomer.patch(
    "ascendspeed.training:setup_model_and_optimizer",
    why="a new process among survivors loads no checkpoint, and knows the step before it builds its data",
    optional=True,
)
def newcomers_load_nothing(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    from adaptor.frameworks import training_loop
    from adaptor.online import rejoin

    if not rejoin.is_newcomer():
        return wrapped(*args, **kwargs)
    with training_loop.loads_nothing(get_args()):
        result = wrapped(*args, **kwargs)
    training_loop.take_place(get_args())
    return result


@newcomer.patch(
    "ascendspeed.training:build_train_valid_test_data_iterators",
    why="what ranks tell each other of their data, a new process among survivors is told by one of them",
    optional=True,
)
def newcomers_are_told_of_data(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import ascendspeed_online
    from adaptor.online import rejoin

    if not rejoin.is_newcomer():
        return wrapped(*args, **kwargs)
    return ascendspeed_online.build_data(lambda: wrapped(*args, **kwargs))


@newcomer.patch(
    "ascendspeed.error_utils:check_equal",
    why="ranks count how many have come to the indices of the data; a new process comes alone",
    optional=True,
)
def newcomers_come_alone(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks.ascendspeed_online import NewcomerData

    if context.part(NewcomerData).is_built and args and type(args[0]) is int and args[0] == 1:
        return None
    return wrapped(*args, **kwargs)


@newcomer.patch(
    "ascendspeed.core.pipeline_parallel.schedules:get_forward_backward_func",
    why="what a rank that dies after its update has added to the losses is in the log line of the step",
    optional=True,
)
def losses_are_kept(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import training_loop

    forward_backward = wrapped(*args, **kwargs)
    log = training_loop.log_of_this_process()
    if log is None:  # the loop compares what it gets with functions
        return forward_backward

    def run(*args: Any, **kwargs: Any) -> Any:
        losses = forward_backward(*args, **kwargs)
        log.add_losses(losses)
        log.add_norm()  # there may be none
        return losses

    return run


for _target, _why, _wrapper in (
    (
        "MegatronOptimizer.clip_grad_norm",
        "the norm is in the log line of the step; an exception after the update would lose it",
        norms_are_kept,
    ),
    (
        "MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
        "with the distributed optimizer the same",
        overflows_are_kept,
    ),
    (
        "Float16OptimizerWithFloat16Params._unscale_main_grads_and_check_for_nan",
        "a step that is left out for an overflow is one in the log, too",
        overflows_are_kept,
    ),
):
    newcomer.patch(f"ascendspeed.optimizer.optimizer:{_target}", why=_why, optional=True)(_wrapper)
