"""Megatron-LM's training loop: begin and end of a step, and the checkpoint of a restart."""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.frameworks import megatron_nodes, megatron_training
from adaptor.frameworks.failed_saves import FailedSaves
from adaptor.frameworks.tested_versions import MEGATRON_SPECIFIER
from adaptor.worker import runtime
from adaptor.worker.unprotected import UnprotectedTraining

training = patching.Unit("training", framework="megatron-lm", tested=MEGATRON_SPECIFIER)


@training.patch(
    "megatron.training.arguments:parse_args",
    why="options that cannot be protected are refused before anything is built; a restart uses --save",
    accepts="(extra_args_provider=, ignore_unknown_args=)",
    claims=True,
)
def arguments_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    context.part(UnprotectedTraining).expect("Megatron-LM")
    if not megatron_training.claim_if_protected():
        return wrapped(*args, **kwargs)
    patching.require_modules("ttp")
    return megatron_training.parse_arguments(
        wrapped,
        args,
        kwargs,
        checks=megatron_training.checks,
        examine=megatron_training.examine,
        fit=megatron_nodes.fit,
    )


@training.patch(
    "megatron.training.training:train",
    why="the training state is complete here: from now on it can be saved",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    from adaptor.frameworks import kernel_timeout, megatron_online  # torch, which is for the script to import

    kernel_timeout.note(get_args())
    operations = get_args().num_floating_point_operations_so_far
    tolerance = context.part(FailedSaves).in_loop()
    return megatron_online.train(wrapped, args, kwargs, operations, tolerance=tolerance)


@training.patch(
    "megatron.training.training:pretrain",
    why="after it the last evaluation and the last save are done, and no death costs a step",
    optional=True,
)
def training_is_finished(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return megatron_training.training_is_finished(wrapped, args, kwargs)


@training.patch(
    "megatron.training.training:train_step",
    why="a step begins: the one before it is finished, scheduler and counters included",
    accepts="(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, ...)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    return megatron_training.make_step(wrapped, args, kwargs, get_args().curr_iteration + 1)


@training.patch(
    "megatron.training.training:checkpoint_and_decide_exit",
    why="a save that has failed is tried again between two intervals",
    accepts=(
        "(model, optimizer, opt_param_scheduler, iteration, num_floating_point_operations_so_far,"
        " checkpointing_context, train_data_iterator)"
    ),
    optional=True,  # without it, only at the next interval
)
def failed_saves_are_tried_again(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import megatron_lm  # torch, which is for the script to import

    ends = wrapped(*args, **kwargs)
    if not ends:
        megatron_lm.try_save_again(args, kwargs)
    return ends


@training.patch(
    "megatron.training.training:evaluate_and_print_results",
    why="an evaluation takes longer than a step, and a rank that hangs in it has a limit of its own",
    optional=True,
)
def evaluations_are_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with runtime.get().session.phase("evaluation"):
        return wrapped(*args, **kwargs)


@training.patch(
    "megatron.training.training:training_log",
    why="ranks that write logs may hang while the others wait for them; incidents are marked in the logs",
    optional=True,
)
def logging_is_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return megatron_training.write_marked_log(wrapped, args, kwargs)
