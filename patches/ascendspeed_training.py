"""ModelLink's training loop (`ascendspeed`): what a step is, where it begins, what a restart resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptor import patching
from adaptor.checkpoint import folder, publish
from adaptor.control import runtime
from adaptor.patches._versions import MODELLINK
from adaptor.replica import choice

training = patching.Unit("ascendspeed-training", framework="ascendspeed", tested=MODELLINK)


@training.patch(
    "ascendspeed.arguments:parse_args",
    why="what cannot be protected is refused before anything is built; a restart resumes from --save",
    accepts="(extra_args_provider=, ignore_unknown_args=)",
)
def arguments_are_checked(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.patches import _ascendspeed, _megatron

    patching.require_modules("ttp")
    provider, *rest = args or (kwargs.pop("extra_args_provider", None),)
    parsed = wrapped(_megatron.accepts_local_copy(provider), *rest, **kwargs)
    _ascendspeed.require_protected(parsed)
    _megatron.take_local_copy(parsed)
    choice.decide(parsed.use_distributed_optimizer, _ascendspeed.data_parallel_size(parsed))
    folder.require_writable(parsed.save)
    if parsed.rank == 0:
        publish.clean(Path(parsed.save))  # what an earlier job, ended in the middle, has left
    _megatron.resume_after_restart(parsed)
    return parsed


@training.patch(
    "ascendspeed.training:train",
    why="the training state is complete here: from now on it can be saved",
    accepts="(forward_step_func, model, optimizer, lr_scheduler, ...)",
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    from adaptor.patches import _ascendspeed

    patching.check("ttp")
    folder.require_newest(get_args().save, get_args().iteration)
    names = ("forward_step_func", "model", "optimizer", "lr_scheduler")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    trainee = _ascendspeed.trainee(given["model"], given["optimizer"], given["lr_scheduler"])
    runtime.get().session.begin_training(trainee, [given["optimizer"].optimizer], get_args().iteration)
    return wrapped(*args, **kwargs)


@training.patch(
    "ascendspeed.training:train_step",
    why="a step begins: the one before it is finished, scheduler and counters included",
    accepts="(forward_step_func, data_iterator, model, optimizer, lr_scheduler, config)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    session = runtime.get().session
    session.begin_step(get_args().iteration + 1, watched=True)
    result = wrapped(*args, **kwargs)
    session.end_step()
    return result
