"""The work of the patches on Megatron-LM's arguments and training loop; part of it is ModelLink's, too.

The patches import this module before the framework, so torch is imported in functions.

The parser of arguments decides whether a protected training loop will run. Only then is the job claimed
(`adaptor.patching.claim`): a framework with its own training loop may use the parser, too. The parser runs
before process groups are made, and before the loop is called. So names decide: code on the call stack of the
parser has the loop among its names, because the code is the module of the loop (`pretrain` calls the parser)
or has imported the loop to call it.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptor import context, hooks, patching, preflight
from adaptor.checkpoint import left_overs, save_folder_claim
from adaptor.frameworks import (
    fine_tuning,
    megatron_restart,
    optimizer_instances,
    parallel_sizes,
    supported_options,
)
from adaptor.frameworks.optimizer_instances import INSTANCES
from adaptor.patching import is_gone
from adaptor.protection_plan import ParallelLayout
from adaptor.protocol.messages import ScriptStage
from adaptor.replica.choice import LONE_MATRICES, ReplicaChoice
from adaptor.worker import runtime
from adaptor.worker.framework_watchdogs import Watchdogs
from adaptor.worker.incident_marks import IncidentMarks, OpenRun

if TYPE_CHECKING:
    pass

Checks = Callable[[Any], Iterator[Callable[[], None]]]
# The module of the loop, and its functions by which a script comes to the loop.
_LOOP = "megatron.training.training"
_ENTRIES = ("pretrain", "train")
# Frameworks that use Megatron-LM's parser, and whose scripts have no loop but theirs, which is protected.
_OTHERS = ("mindspeed_llm.training.training", "modellink.training")
# The calls of the framework in the traceback of a logger's exception (`loggers_are_the_cause`).
_CALLS_OF_PRETRAIN = tuple(
    {(module, "pretrain")} for module in (_LOOP, "flagscale.train.train", "mindspeed_mm.training")
)
_PACKAGES = ("megatron.", "flagscale.", "mindspeed_mm.")
_LOGGERS = "megatron.training.one_logger_utils"


def parse_arguments(
    parse: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    checks: Checks,
    examine: Callable[[Any], None],
    fit: Callable[[Any], object] = lambda parsed: None,
) -> Any:
    """Return the result of the framework's parser, with the arguments of a restart after a fault.

    Args:
        checks: returns the checks of the parsed arguments before anything is built.
        examine: records what a report says of the job.
        fit: changes parallel sizes to the number of ranks.

    Raises:
        AdaptorError: the job cannot be protected.
    """
    provider, *further_args = args or (kwargs.pop("extra_args_provider", None),)
    parsed = parse(supported_options.accepts_local_copy(provider), *further_args, **kwargs)
    if context.part(preflight.Preflight).findings is not None:
        examine(parsed)
        return parsed
    if getattr(parsed, "skip_train", False):  # it evaluates, and saves nothing
        return parsed
    fit(parsed)
    for check in checks(parsed):
        check()
    context.part(Watchdogs).switch_off()
    from adaptor.online import rejoin

    if not rejoin.is_newcomer():  # whose job has checked the folder, and has the lease
        save_folder_claim.require_writable(parsed.save)
        if parsed.rank == 0:
            save_folder_claim.claim(parsed.save)
            left_overs.clean(Path(parsed.save))  # what an earlier job, ended in the middle, has left
        megatron_restart.resume_after_restart(parsed)
    return parsed


def checks(parsed: Any) -> Iterator[Callable[[], None]]:
    """Return the checks before anything is built; each raises an AdaptorError."""
    yield lambda: supported_options.take_local_copy(parsed)
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
            parsed, parsed.pipeline_model_parallel_size, aligned=getattr(parsed, "align_grad_reduce", True)
        )
    )
    is_layer_wise = supported_options.is_layer_wise(parsed)
    choice.has_lone_parts(is_layer_wise or parallel_sizes.has_lone_experts(parsed))
    if is_layer_wise:
        yield lambda: choice.require_none(LONE_MATRICES)
    yield lambda: choice.decide(
        supported_options.is_sharded(parsed),
        supported_options.data_parallel_size(parsed),
        supported_options.expert_data_parallel_size(parsed),
    )


def examine(parsed: Any) -> None:
    """Record for the report the refusals, and the protection."""
    from adaptor.frameworks import megatron_online_support

    def layout() -> ParallelLayout:
        has_experts = getattr(parsed, "num_experts", None) is not None
        experts = supported_options.expert_data_parallel_size(parsed)
        # A matrix on one rank alone is for the plan what an expert on one rank alone is.
        is_layer_wise = supported_options.is_layer_wise(parsed)
        stages = parsed.pipeline_model_parallel_size
        return ParallelLayout(
            world_size=parsed.world_size,
            data_parallel=supported_options.data_parallel_size(parsed),
            experts=1 if is_layer_wise else experts if has_experts else 0,
            sharded=is_layer_wise or parsed.use_distributed_optimizer,
            instances=getattr(parsed, INSTANCES, 1),
            tensor=parsed.tensor_model_parallel_size,
            expert=parallel_sizes.experts_size(parsed) // stages if has_experts else 1,
            lone=LONE_MATRICES if is_layer_wise else "",
        )

    parsed.use_persistent_ckpt_worker = False  # the framework starts it before it looks at all arguments
    further_checks: list[Callable[[], None]] = [lambda: save_folder_claim.require_possible(parsed.save)]
    if context.part(preflight.Preflight).knows_ranks and context.get().settings.batch == "keep":
        further_checks.append(lambda: parallel_sizes.require_whole_batches(parsed))
    preflight.examine(
        [*checks(parsed), *further_checks],
        layout,
        lambda: parallel_sizes.model_of(parsed),
        lambda: megatron_online_support.reasons(parsed),
    )


def make_step(wrapped: Callable[..., Any], args: Any, kwargs: Any, step: int) -> Any:
    """Call the framework's `train_step`, which makes `step`."""
    from adaptor.frameworks import training_loop

    training_loop.begin_step(step)
    with runtime.get().session.step(step):
        result = wrapped(*args, **kwargs)
    training_loop.end_step()
    return result


def write_log(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the framework's `training_log`, with the sums of steps that were made before a fault."""
    from adaptor.frameworks import training_loop

    log = training_loop.log_of_this_process()
    return wrapped(*args, **kwargs) if log is None else log.write(wrapped, args, kwargs)


def write_marked_log(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call Megatron-LM's `training_log` and mark incidents in its loggers."""
    with runtime.get().session.phase("logging"):
        result = write_log(wrapped, args, kwargs)
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        run = context.part(OpenRun).client = get_wandb_writer()
        if (marks := context.part(IncidentMarks)).are_missing:
            marks.write(runtime.get().session.board.finished, get_tensorboard_writer(), run)
        return result


def claim_if_protected() -> bool:
    """Claim the job if its script will run a protected training loop; called from the parser.

    Returns:
        True if the job is claimed.

    Raises:
        DriftError: a patch does not fit the framework.
    """
    if not patching.is_claimed("ttp") and _will_be_protected():
        patching.claim("ttp")
    return patching.is_claimed("ttp")


def _will_be_protected() -> bool:
    if any(name in sys.modules for name in _OTHERS):
        return True
    loop = sys.modules.get(_LOOP)
    if loop is None:
        return is_gone(_LOOP)  # a version that has moved the loop is refused
    entries = {id(vars(loop)[name]) for name in _ENTRIES if name in vars(loop)}
    frame = sys._getframe().f_back
    while frame is not None:
        for names in (frame.f_globals, frame.f_locals):
            if not entries.isdisjoint(map(id, names.values())):
                return True
        frame = frame.f_back
    return False


def training_is_finished(wrapped: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call the framework's `pretrain`; after it the board says that the script has finished its training.

    The board says so as well if only a logger has raised the exception of `pretrain`.
    """
    worker = runtime.of_this_process()
    if worker is None:  # a report of what would be protected
        return wrapped(*args, **kwargs)
    session = worker.session
    try:
        result = wrapped(*args, **kwargs)
    except Exception as error:
        has_trained = session.trainee is not None and not session.is_training
        if has_trained and loggers_are_the_cause(error):
            session.board.reach(ScriptStage.FINISHED)
        raise
    session.board.reach(ScriptStage.FINISHED)
    return result


def loggers_are_the_cause(error: BaseException) -> bool:
    """Return whether a logger has raised `error`, after the last save and the last evaluation.

    After its training loop `pretrain` saves, evaluates, ends the run of W&B, waits for an asynchronous save,
    and ends the run of one_logger. Exceptions of loggers come from `pretrain` itself, not from another
    function of the framework. An asynchronous save may not be whole at the end of W&B's run: then the answer
    is no.
    """
    from megatron.training import get_args

    if getattr(get_args(), "async_save", False):
        return False
    calls = [
        (str(frame.f_globals.get("__name__")), frame.f_code.co_name)
        for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    of_the_framework = {call for call in calls if call[0].startswith(_PACKAGES) and call[0] != _LOGGERS}
    return of_the_framework in _CALLS_OF_PRETRAIN
