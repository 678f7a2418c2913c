"""ModelLink's training loop (`ascendspeed`): begin and end of a step, and the checkpoint of a restart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from adaptor import context, hooks, patching, preflight
from adaptor.checkpoint import left_overs, save_folder_claim
from adaptor.frameworks import local_copy_flag, megatron_restart
from adaptor.patches._versions import MODELLINK
from adaptor.replica.choice import ReplicaChoice
from adaptor.worker import runtime
from adaptor.worker.unprotected import UnprotectedTraining
from adaptor.worker.watchdogs import Watchdogs

training = patching.Unit("ascendspeed-training", framework="ascendspeed", tested=MODELLINK)


@training.patch(
    "ascendspeed.arguments:parse_args",
    why="options that cannot be protected are refused before anything is built; a restart uses --save",
    accepts="(extra_args_provider=, ignore_unknown_args=)",
    claims=True,
)
def arguments_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    patching.claim("ttp")  # this parser is of one framework, whose loop is protected
    patching.require_modules("ttp")
    context.part(UnprotectedTraining).expect("ModelLink")
    provider, *further_args = args or (kwargs.pop("extra_args_provider", None),)
    parsed = wrapped(local_copy_flag.accepts_local_copy(provider), *further_args, **kwargs)
    if context.part(preflight.Preflight).findings is not None:
        _examine(parsed)
        return parsed
    if getattr(parsed, "skip_train", False):  # it evaluates, and saves nothing
        return parsed
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
    from adaptor.frameworks import ascendspeed

    yield from ascendspeed.checks(parsed)
    for hook in hooks.of_worker():
        yield partial(hook.require_other_loop, parsed.world_size, parsed)
    yield lambda: local_copy_flag.take_local_copy(parsed)
    yield lambda: context.part(ReplicaChoice).decide(
        parsed.use_distributed_optimizer, ascendspeed.data_parallel_size(parsed)
    )


def _examine(parsed: Any) -> None:
    """Record for the report the refusals, and the protection."""
    from adaptor.frameworks import ascendspeed, ascendspeed_online

    def not_online() -> list[str]:
        return list(filter(None, (ascendspeed_online.of_options(parsed),)))

    def made() -> preflight.ParallelLayout:
        return preflight.ParallelLayout(
            world_size=parsed.world_size,
            data_parallel=ascendspeed.data_parallel_size(parsed),
            experts=0,
            sharded=parsed.use_distributed_optimizer,
            instances=1,
            tensor=parsed.tensor_model_parallel_size,
            may_copy=False,
        )

    checks = [*_checks(parsed), lambda: save_folder_claim.require_possible(parsed.save)]
    preflight.examine(checks, made, lambda: None, not_online)


@training.patch(
    "ascendspeed.training:train",
    why="the training state is complete here: from now on it can be saved",
    accepts=(
        "(forward_step_func, model, optimizer, lr_scheduler, "
        "train_data_iterator, valid_data_iterator, config)"
    ),
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.online import rejoin  # torch, which is for the script to import

    if rejoin.of_this_process() is None:
        _begin(args, kwargs)
        trained = wrapped(*args, **kwargs)
    else:
        from adaptor.frameworks import ascendspeed_online

        trained = ascendspeed_online.train(wrapped, args, kwargs, lambda: _begin(args, kwargs))
    runtime.get().session.end_training()
    return trained


def _begin(args: Any, kwargs: Any) -> None:
    """The training loop is called with `args` and `kwargs`: its state can be saved from now on."""
    from ascendspeed import get_args

    from adaptor.frameworks import ascendspeed

    patching.check("ttp")
    save_folder_claim.require_no_later_step(get_args().save, get_args().iteration)
    names = ("forward_step_func", "model", "optimizer", "lr_scheduler")
    call_arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    trainee = ascendspeed.trainee(
        call_arguments["model"], call_arguments["optimizer"], call_arguments["lr_scheduler"]
    )
    context.part(Watchdogs).warn_if_on()
    for hook in hooks.of_worker():
        hook.watch(trainee.state.model)
    runtime.get().session.begin_training(
        trainee, [call_arguments["optimizer"].optimizer], get_args().iteration
    )


@training.patch(
    "ascendspeed.training:train_step",
    why="a step begins: the one before it is finished, scheduler and counters included",
    accepts="(forward_step_func, data_iterator, model, optimizer, lr_scheduler, config)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    from adaptor.online import rejoin  # torch, which is for the script to import

    step = get_args().iteration + 1
    if rejoin.of_this_process() is not None:
        from adaptor.frameworks import loop_recovery

        loop_recovery.begin_step(step)
    with runtime.get().session.step(step):
        return wrapped(*args, **kwargs)


@training.patch(
    "ascendspeed.training:evaluate_and_print_results",
    why="an evaluation takes longer than a step, and a rank that hangs in it has a limit of its own",
    accepts="(...)",
    optional=True,
)
def evaluations_are_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with runtime.get().session.phase("evaluation"):
        return wrapped(*args, **kwargs)


@training.patch(
    "ascendspeed.training:training_log",
    why="ranks that write logs may hang while the others wait for them in the next step",
    accepts="(...)",
    optional=True,
)
def logging_is_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.online import rejoin  # torch, which is for the script to import

    with runtime.get().session.phase("logging"):
        log = None
        if rejoin.of_this_process() is not None:
            from adaptor.frameworks import loop_recovery

            log = loop_recovery.log_of_this_process()
        return wrapped(*args, **kwargs) if log is None else log.write(wrapped, args, kwargs)
