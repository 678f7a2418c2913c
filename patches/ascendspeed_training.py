"""ModelLink (`ascendspeed`): its training loop, and its checkpoints, protected as those of Megatron-LM.

ModelLink 1.2, on Megatron-core 0.6, has a training loop with a name of its own. The other patches for
ModelLink 1.2 are patches on Megatron-LM, by MindSpeed's classes (`mindspeed.py`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from adaptor import context, patching
from adaptor.checkpoint import resume_check
from adaptor.checkpoint.divided_reading import CheckedFiles
from adaptor.frameworks import megatron_training
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.frameworks.tested_versions import MODELLINK
from adaptor.worker import runtime
from adaptor.worker.unprotected import UnprotectedTraining

modellink = patching.Unit("modellink", framework="modellink", tested="1.2")
training = patching.Unit("ascendspeed-training", framework="ascendspeed", tested=MODELLINK)


@modellink.patch(
    "modellink.training:train",
    why="the framework has a training loop of its own, and the training state is complete here",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def its_training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import megatron_lm  # torch, which is for the script to import

    # It counts its floating-point operations from 0, also where it goes on from a checkpoint.
    _, protected = megatron_lm.describe_call(args, kwargs, operations=0)
    megatron_lm.begin_training(replace(protected, may_copy=False))
    trained = wrapped(*args, **kwargs)
    runtime.get().session.end_training()
    return trained


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
    from adaptor.frameworks import ascendspeed_online  # torch, which is for the script to import

    return megatron_training.parse_arguments(
        wrapped, args, kwargs, checks=ascendspeed_online.checks, examine=ascendspeed_online.examine
    )


@training.patch(
    "ascendspeed.training:train",
    why="the training state is complete here: from now on it can be saved",
    accepts=(
        "(forward_step_func, model, optimizer, lr_scheduler, "
        "train_data_iterator, valid_data_iterator, config)"
    ),
)
def training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import ascendspeed_online  # torch, which is for the script to import

    return ascendspeed_online.train(wrapped, args, kwargs)


@training.patch(
    "ascendspeed.training:train_step",
    why="a step begins: the one before it is finished, scheduler and counters included",
    accepts="(forward_step_func, data_iterator, model, optimizer, lr_scheduler, config)",
)
def steps_are_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    return megatron_training.make_step(wrapped, args, kwargs, get_args().iteration + 1)


@training.patch(
    "ascendspeed.training:training_log",
    why="ranks that write logs may hang while the others wait for them in the next step",
    optional=True,
)
def logging_is_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with runtime.get().session.phase("logging"):
        return megatron_training.write_log(wrapped, args, kwargs)


checkpointing = patching.Unit("ascendspeed-checkpointing", framework="ascendspeed", tested=MODELLINK)


@checkpointing.patch(
    "ascendspeed.checkpointing:save_checkpoint",
    why="a regular save that is cut short must not leave half a checkpoint under a final name",
    accepts="(iteration, model, optimizer, lr_scheduler)",
)
def regular_saves_are_complete(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    with (
        runtime.get().session.phase("save"),
        context.part(RegularSaves).regular(get_args().save, args[0] if args else kwargs["iteration"]),
    ):
        return wrapped(*args, **kwargs)


@checkpointing.patch(
    "ascendspeed.checkpointing:load_checkpoint",
    why="a checkpoint that was damaged after its save is set aside; the newest intact one is loaded",
    accepts="(model, optimizer, lr_scheduler, load_arg=, ...)",
)
def what_is_loaded_is_intact(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    megatron_args = get_args()
    load = getattr(megatron_args, args[3] if len(args) > 3 else kwargs.get("load_arg", "load"))
    with runtime.get().session.pace.loading(), context.part(CheckedFiles).loading():
        resume_check.require_intact(Path(load), Path(megatron_args.save), None)
        return wrapped(*args, **kwargs)


# The wrappers of Megatron-LM's functions of these names, which are declared before (`patches.FILES`).
training.patch_copy(
    "ascendspeed.training:evaluate_and_print_results",
    of="megatron.training.training:evaluate_and_print_results",
)
for name in ("get_checkpoint_name", "get_checkpoint_tracker_filename"):
    checkpointing.patch_copy(
        f"ascendspeed.checkpointing:{name}", of=f"megatron.training.checkpointing:{name}"
    )
