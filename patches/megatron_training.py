"""Megatron-LM's training loop: begin and end of a step, and the checkpoint of a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from adaptor import context, hooks, patching, preflight
from adaptor.checkpoint import left_overs, save_folder_claim
from adaptor.frameworks import (
    compared_save,
    fine_tuning,
    local_copy_flag,
    megatron_loggers,
    megatron_nodes,
    megatron_restart,
    megatron_sizes,
    optimizer_instances,
    parallel_sizes,
    script_loop,
    supported_options,
)
from adaptor.frameworks.failed_saves import FailedSaves
from adaptor.frameworks.optimizer_instances import INSTANCES
from adaptor.patches._versions import MEGATRON
from adaptor.patches.megatron_core import inner_optimizers
from adaptor.protocol.messages import ScriptStage
from adaptor.replica.choice import ReplicaChoice
from adaptor.worker import runtime
from adaptor.worker.incident_marks import IncidentMarks
from adaptor.worker.open_run import OpenRun
from adaptor.worker.unprotected import UnprotectedTraining
from adaptor.worker.watchdogs import Watchdogs

training = patching.Unit("training", framework="megatron-lm", tested=MEGATRON)


@training.patch(
    "megatron.training.arguments:parse_args",
    why="options that cannot be protected are refused before anything is built; a restart uses --save",
    accepts="(extra_args_provider=, ignore_unknown_args=)",
    claims=True,
)
def arguments_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    context.part(UnprotectedTraining).expect("Megatron-LM")
    if not script_loop.claim_if_protected():
        return wrapped(*args, **kwargs)
    patching.require_modules("ttp")
    provider, *further_args = args or (kwargs.pop("extra_args_provider", None),)
    parsed = wrapped(local_copy_flag.accepts_local_copy(provider), *further_args, **kwargs)
    if context.part(preflight.Preflight).findings is not None:
        examine(parsed)
        return parsed
    if getattr(parsed, "skip_train", False):  # it evaluates, and saves nothing
        return parsed
    megatron_nodes.fit(parsed)
    for check in _checks(parsed):
        check()
    context.part(Watchdogs).switch_off()
    from adaptor.online import rejoin  # torch, which is for the script to import

    if rejoin.is_newcomer():  # this job is in the middle of its training, and has checked the folder
        if parsed.rank == 0:
            save_folder_claim.claim(parsed.save)
        return parsed
    save_folder_claim.require_writable(parsed.save)
    if parsed.rank == 0:
        save_folder_claim.claim(parsed.save)
        left_overs.clean(Path(parsed.save))  # what an earlier job, ended in the middle, has left
    megatron_restart.resume_after_restart(parsed)
    return parsed


def _checks(parsed: Any) -> Iterator[Callable[[], None]]:
    """Return the checks before anything is built; each raises an AdaptorError."""
    yield lambda: local_copy_flag.take_local_copy(parsed)
    yield lambda: supported_options.require_alone(parsed)
    yield lambda: supported_options.require_cpu_options(parsed)
    yield from supported_options.checks(parsed)
    for hook in hooks.of_worker():
        yield from hook.checks(parsed, begins=False)
    yield from fine_tuning.checks(parsed)
    yield lambda: supported_options.require_folders(parsed)
    choice = context.part(ReplicaChoice)
    choice.cannot_split(
        optimizer_instances.wrong_in_framework()
        or optimizer_instances.wrong_with_options(
            parsed,
            parsed.pipeline_model_parallel_size,
            aligned=getattr(parsed, "align_grad_reduce", True),
        )
    )
    choice.has_lone_experts(parallel_sizes.has_lone_experts(parsed))
    yield lambda: choice.decide(
        parsed.use_distributed_optimizer,
        supported_options.data_parallel_size(parsed),
        supported_options.expert_data_parallel_size(parsed),
    )


def examine(parsed: Any) -> None:
    """Record for the report the refusals, and the protection."""
    from adaptor.frameworks import megatron_online_support

    def made() -> preflight.ParallelLayout:
        has_experts = getattr(parsed, "num_experts", None) is not None
        return preflight.ParallelLayout(
            world_size=parsed.world_size,
            data_parallel=supported_options.data_parallel_size(parsed),
            experts=supported_options.expert_data_parallel_size(parsed) if has_experts else 0,
            sharded=parsed.use_distributed_optimizer,
            instances=getattr(parsed, INSTANCES, 1),
            tensor=parsed.tensor_model_parallel_size,
            expert=parallel_sizes.experts_size(parsed) // parsed.pipeline_model_parallel_size
            if has_experts
            else 1,
        )

    parsed.use_persistent_ckpt_worker = False  # the framework starts it before it looks at all arguments
    checks = [*_checks(parsed), lambda: save_folder_claim.require_possible(parsed.save)]
    preflight.examine(
        checks, made, lambda: megatron_sizes.model_of(parsed), lambda: megatron_online_support.reasons(parsed)
    )


def _require_protected(parsed: Any) -> None:
    supported_options.require_protected(parsed)
    checks = [check for hook in hooks.of_worker() for check in hook.checks(parsed, begins=True)]
    for check in (*checks, *fine_tuning.checks(parsed)):
        check()


@training.patch(
    "megatron.training.training:train",
    why="the training state is complete here: from now on it can be saved",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    def begins() -> None:
        begin(args, kwargs, operations=get_args().num_floating_point_operations_so_far)

    from adaptor.frameworks import kernel_timeout
    from adaptor.online import rejoin  # torch, which is for the script to import

    kernel_timeout.note(get_args())
    attach_copier()
    with context.part(FailedSaves).in_loop():
        if rejoin.of_this_process() is None:
            begins()
            trained = wrapped(*args, **kwargs)
        else:
            from adaptor.frameworks import megatron_online

            trained = megatron_online.train(wrapped, args, kwargs, begins)
    runtime.get().session.end_training()
    return trained


@training.patch(
    "megatron.training.training:pretrain",
    why="behind it the last evaluation and the last save are done, and no death costs a step",
    accepts="(...)",
    optional=True,
)
def training_is_finished(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    worker = runtime.of_this_process()
    if worker is None:  # a report of what would be protected
        return wrapped(*args, **kwargs)
    session = worker.session
    try:
        result = wrapped(*args, **kwargs)
    except Exception as error:
        has_trained = session.trainee is not None and not session.is_training
        if has_trained and megatron_loggers.are_the_cause(error):
            session.board.reach(ScriptStage.FINISHED)
        raise
    session.board.reach(ScriptStage.FINISHED)
    return result


def attach_copier() -> None:
    """Let this rank make copies in host memory, compare its state with the other holders, and hold drills, if
    set.
    """
    from adaptor.host_copy import start  # torch, which is for the script to import

    worker = runtime.get()
    if isinstance(worker, runtime.Runtime):  # other engines do none of it
        start.attach(worker.session, worker.tell_of_copy)
        compared_save.attach(worker)


def begin(args: Any, kwargs: Any, operations: float, rerun: bool = True) -> None:
    """The training loop is called with `args` and `kwargs`: its state can be saved from now on.

    Args:
        operations: the floating-point operations so far, where the loop begins to count.
        rerun: whether the loop's saves have the state of the rerun state machine.
    """
    from megatron.training import get_args

    from adaptor.frameworks import layout_beside, megatron_lm
    from adaptor.host_copy import start

    patching.check("ttp")
    _require_protected(get_args())  # a checkpoint or a yaml file may have changed them
    save_folder_claim.require_no_later_step(get_args().save, get_args().iteration)
    megatron_nodes.count_iterations(get_args())
    megatron_restart.tell_of_last_words(get_args())
    names = ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator")
    call_arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    state = (call_arguments["model"], call_arguments["optimizer"], call_arguments["opt_param_scheduler"])
    train_data = call_arguments.get("train_data_iterator")
    trainee = megatron_lm.trainee(*state, operations, rerun, train_data=train_data)
    if path := context.get().settings.layout_only:
        layout_beside.write_alone(Path(path), trainee.barrier)
    trainee = start.reserve(runtime.get().session, trainee)
    context.part(Watchdogs).warn_if_on()
    for hook in hooks.of_worker():
        hook.watch(trainee.state.model)
    compared_save.require_replays(call_arguments["model"])
    runtime.get().session.begin_training(
        trainee, inner_optimizers(call_arguments["optimizer"]), get_args().iteration
    )


@training.patch(
    "megatron.training.training:train_step",
    why="a step begins: the one before it is finished, scheduler and counters included",
    accepts="(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, ...)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    step = get_args().curr_iteration + 1
    from adaptor.online import rejoin  # torch, which is for the script to import

    if rejoin.of_this_process() is not None:
        from adaptor.frameworks import loop_recovery

        loop_recovery.begin_step(step)
    with runtime.get().session.step(step):
        result = wrapped(*args, **kwargs)
    if rejoin.of_this_process() is not None:
        loop_recovery.end_step()
    return result


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
    accepts="(...)",
    optional=True,
)
def evaluations_are_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with runtime.get().session.phase("evaluation"):
        return wrapped(*args, **kwargs)


@training.patch(
    "megatron.training.training:training_log",
    why="ranks that write logs may hang while the others wait for them; incidents are marked in the logs",
    accepts="(...)",
    optional=True,
)
def logging_is_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return write_log(wrapped, args, kwargs)


def write_log(wrapped: Any, args: Any, kwargs: Any) -> Any:
    """Call the framework's `training_log` and mark incidents in its loggers."""
    from adaptor.online import rejoin  # torch, which is for the script to import

    with runtime.get().session.phase("logging"):
        log = None
        if rejoin.of_this_process() is not None:
            from adaptor.frameworks import loop_recovery

            log = loop_recovery.log_of_this_process()
        result = wrapped(*args, **kwargs) if log is None else log.write(wrapped, args, kwargs)
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        run = context.part(OpenRun).client = get_wandb_writer()
        if (marks := context.part(IncidentMarks)).are_missing:
            marks.write(runtime.get().session.board.finished, get_tensorboard_writer(), run)
        return result
