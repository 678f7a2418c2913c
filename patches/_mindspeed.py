"""The adaptor's patches around what MindSpeed puts in their place.

MindSpeed makes a patched function anew at each application: what it first found, or what was registered to
replace that, within all wrappers that were registered, the last one outermost. What it first found has our
wrapper in it; a replacement has not, and not every wrapper calls what it wraps (that of MindSpeed-LLM around
`save_checkpoint` does not). So ours is registered once more, to be outermost: by a feature that comes last,
and in versions without features right before each application.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from adaptor import patching
from adaptor.replica import layout

# As `layout` has them for Megatron-LM.
PROTECTED: layout.Values = (
    ("lora_target_modules", ([], None), "LoRA, whose checkpoints lack the model that it began from,"),
    ("reuse_fp32_param", (False, None), "main params that share their memory with the weights"),
    (
        "optimizer_selection",
        ("fused_adamw", "fused_torch_adamw"),
        "an optimizer that also keeps averages of the weights, which last words would lack,",
    ),
    ("use_ema", (False, None), "averages of the weights, which last words would lack,"),
    ("swap_optimizer", (False, None), "optimizer state that comes and goes between device and host"),
    ("virtual_optimizer", (None,), "optimizer state that comes and goes between device and host"),
    ("quant_states", (None,), "moments that are not in float32"),
    ("quant_grads", (False, None), "gradients that are not where torch has them"),
    ("layerzero", (False, None), "LayerZeRO"),
)

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def come_last(features: list[Any]) -> None:
    """Put our feature to the end of MindSpeed's list: it then knows what all others have registered."""
    from adaptor.patches._mindspeed_feature import PatchesSurvive

    mine = next((feature for feature in features if isinstance(feature, PatchesSurvive)), None)
    if mine is not None:
        features.remove(mine)
    features.append(mine or PatchesSurvive())


def has_features() -> bool:
    """Whether a manager of features is at work, which our feature is told by; up to 2.0 there is none."""
    module = sys.modules.get("mindspeed.features_manager.features_manager")
    manager = getattr(module, "MindSpeedFeaturesManager", None)
    return hasattr(manager, "apply_features_patches")


def be_outermost(entry: Any) -> None:
    """Before MindSpeed applies an entry of its manager: our patch of its function is the last wrapper."""
    targets = {target.replace(":", "."): target for target in patching.targets("ttp")}
    target = targets.get(f"{entry.orig_module_name}.{entry.orig_func_name}")
    if target is not None:
        others = [wrapper for wrapper in entry.wrappers if not hasattr(wrapper, "of_ttp")]
        entry.wrappers[:] = [*others, outermost(entry, target)]


def outermost(entry: Any, target: str) -> Wrap:
    """What an entry of MindSpeed's manager takes as a wrapper of the function that `target` names."""

    # It tells a wrapper by the end of its name.
    def patches_survive_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        return patching.around("ttp", target, function, entry.patch_func)

    patches_survive_wrapper.of_ttp = True  # type: ignore[attr-defined]
    return patches_survive_wrapper
