"""Megatron-LM's training loop: what a step is, where it begins, and what a restarted job resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptor import patching
from adaptor.checkpoint import folder, publish
from adaptor.control import runtime
from adaptor.patches._versions import MEGATRON
from adaptor.patches.megatron_core import inner_optimizers, instances_are_looked_at
from adaptor.replica import choice, layout

training = patching.Unit("training", framework="megatron-lm", tested=MEGATRON)


@training.patch(
    "megatron.training.arguments:parse_args",
    why="what cannot be protected is refused before anything is built; a restart resumes from --save",
    accepts="(extra_args_provider=, ignore_unknown_args=)",
)
def arguments_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.patches import _megatron

    patching.require_modules("ttp")
    provider, *rest = args or (kwargs.pop("extra_args_provider", None),)
    parsed = wrapped(_megatron.accepts_local_copy(provider), *rest, **kwargs)
    _megatron.take_local_copy(parsed)
    layout.require_alone(parsed)
    _require_protected(parsed)
    if getattr(parsed, "num_experts", None) is not None:
        layout.require_folders_for_experts(
            parsed.tensor_model_parallel_size,
            getattr(parsed, "expert_tensor_parallel_size", None),
            parsed.expert_model_parallel_size,
        )
    instances_are_looked_at()
    choice.decide(
        parsed.use_distributed_optimizer,
        layout.data_parallel_size(parsed),
        layout.expert_data_parallel_size(parsed),
    )
    folder.require_writable(parsed.save)
    if parsed.rank == 0:
        publish.clean(Path(parsed.save))  # what an earlier job, ended in the middle, has left
    _megatron.resume_after_restart(parsed)
    return parsed


def _require_protected(parsed: Any) -> None:
    from adaptor.patches import _mindspeed

    layout.require_protected(parsed)
    layout.require_values(_mindspeed.PROTECTED, parsed)


@training.patch(
    "megatron.training.training:train",
    why="the training state is complete here: from now on it can be saved",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    begin(args, kwargs, operations=get_args().num_floating_point_operations_so_far)
    return wrapped(*args, **kwargs)


def begin(args: Any, kwargs: Any, operations: float, rerun: bool = True) -> None:
    """The training loop is called with `args` and `kwargs`: from now on its state can be saved.

    Args:
        operations: the floating-point operations so far, where the loop begins to count.
        rerun: whether the saves that it makes have the state of the rerun state machine.
    """
    from megatron.training import get_args

    from adaptor.patches import _megatron

    patching.check("ttp")
    _require_protected(get_args())  # a checkpoint or a yaml file may have changed them
    folder.require_newest(get_args().save, get_args().iteration)
    names = ("forward_step_func", "model", "optimizer", "opt_param_scheduler")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    state = (given["model"], given["optimizer"], given["opt_param_scheduler"])
    trainee = _megatron.trainee(*state, operations, rerun)
    runtime.get().session.begin_training(trainee, inner_optimizers(given["optimizer"]), get_args().iteration)


@training.patch(
    "megatron.training.training:train_step",
    why="a step begins: the one before it is finished, scheduler and counters included",
    accepts="(forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, ...)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from megatron.training import get_args

    session = runtime.get().session
    session.begin_step(get_args().curr_iteration + 1, watched=True)
    result = wrapped(*args, **kwargs)
    session.end_step()
    return result
