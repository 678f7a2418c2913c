"""MindSpeed on top of Megatron, and MindSpeed-LLM: replacements of Megatron's functions are protected, too.

MindSpeed's manager patches Megatron after the import of each module, and so wraps the adaptor's wrappers. A
function in the place of Megatron's loses the adaptor's wrappers; so the adaptor adds a last feature to
MindSpeed's features, which wraps the replacements. MindSpeed-LLM has its own training loop.
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.frameworks import megatron_training, mindspeed_wrappers, supported_options
from adaptor.frameworks.tested_versions import MINDSPEED

mindspeed = patching.Unit("mindspeed", framework="mindspeed", tested=MINDSPEED)
llm = patching.Unit("mindspeed-llm", framework="mindspeed_llm", tested=MINDSPEED)


@mindspeed.patch(
    "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager.apply_features_pre_patches",
    why="a second system that saves the same job is refused before anything of it is imported",
    accepts="(mindspeed_args)",
    optional=True,  # since 2.1
)
def no_other_system_saves_the_job(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    supported_options.require_alone(args[0] if args else kwargs["mindspeed_args"])
    return wrapped(*args, **kwargs)


@mindspeed.patch(
    "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager.apply_features_patches",
    why="a function that its features put in the place of a patched one is patched, too",
    accepts="(mindspeed_args)",
    claims=True,  # MindSpeed-LLM replaces functions when it is imported, before any arguments are parsed
    optional=True,  # since 2.1
)
def our_feature_comes_last(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    mindspeed_wrappers.come_last(instance.FEATURES_LIST)
    return wrapped(*args, **kwargs)


@mindspeed.patch(
    "mindspeed.patch_utils:Patch.apply_patch",
    why="versions without features put their functions in the place of patched ones here",
    accepts="()",
    claims=True,  # as above
)
def our_wrapper_is_outermost(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    if not mindspeed_wrappers.has_features():
        mindspeed_wrappers.be_outermost(instance)
    return wrapped(*args, **kwargs)


@llm.patch(
    "mindspeed_llm.training.training:train",
    why="the framework has a training loop of its own, and the training state is complete here",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def its_training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.frameworks import megatron_online
    from adaptor.frameworks.mindspeed_memory import MindspeedLoop  # torch, which is for the script to import

    # It counts its floating-point operations from 0, also where it goes on from a checkpoint; its save has no
    # state of the rerun state machine.
    return megatron_online.train(wrapped, args, kwargs, operations=0, kind=MindspeedLoop, rerun=False)


@llm.patch(
    "mindspeed_llm.training.training:pretrain",
    why="after it the last evaluation and the last save are done, and no death costs a step",
    optional=True,
    unless_imported=True,
)
def its_training_is_finished(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return megatron_training.training_is_finished(wrapped, args, kwargs)


@llm.patch(
    "mindspeed_llm.training.training:training_log",
    why="ranks that write logs may hang while the others wait for them; incidents are marked in the logs",
    optional=True,
    unless_imported=True,  # since 2.3 it has one of its own; before, it is that of Megatron-LM
)
def its_logging_is_watched(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return megatron_training.write_marked_log(wrapped, args, kwargs)
