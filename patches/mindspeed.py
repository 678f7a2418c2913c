"""MindSpeed on top of Megatron, and MindSpeed-LLM: what they replace is protected as what was there before.

MindSpeed patches Megatron by a manager of its own, after the import of each module, so around our wrappers.
But what it replaces as a whole has none of them; so a feature of ours is the last among its features.
MindSpeed-LLM starts a training loop of its own, by its own name.
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.patches import megatron_training
from adaptor.replica import layout

TESTED = ">=2.0,<26.2"

mindspeed = patching.Unit("mindspeed", framework="mindspeed", tested=TESTED)
llm = patching.Unit("mindspeed-llm", framework="mindspeed_llm", tested=TESTED)


@mindspeed.patch(
    "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager.apply_features_pre_patches",
    why="a second system that saves the same job is refused before anything of it is imported",
    accepts="(mindspeed_args)",
    optional=True,  # since 2.1
)
def nobody_else_saves_the_job(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    layout.require_alone(args[0] if args else kwargs["mindspeed_args"])
    return wrapped(*args, **kwargs)


@mindspeed.patch(
    "mindspeed.features_manager.features_manager:MindSpeedFeaturesManager.apply_features_patches",
    why="what its features put in the place of a patched function is patched, too",
    accepts="(mindspeed_args)",
    optional=True,  # since 2.1
)
def a_feature_of_ours_comes_last(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.patches import _mindspeed

    _mindspeed.come_last(instance.FEATURES_LIST)
    return wrapped(*args, **kwargs)


@mindspeed.patch(
    "mindspeed.patch_utils:Patch.apply_patch",
    why="the same in versions that have no features",
    accepts="()",
)
def ours_is_outermost(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.patches import _mindspeed

    if not _mindspeed.has_features():
        _mindspeed.be_outermost(instance)
    return wrapped(*args, **kwargs)


@llm.patch(
    "mindspeed_llm.training.training:train",
    why="a training loop of its own: the training state is complete here",
    accepts="(forward_step_func, model, optimizer, opt_param_scheduler, ...)",
)
def its_training_can_be_saved(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # It counts its floating-point operations from 0, also where it goes on from a checkpoint; its save has no
    # state of the rerun state machine.
    megatron_training.begin(args, kwargs, operations=0, rerun=False)
    return wrapped(*args, **kwargs)
