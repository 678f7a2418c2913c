"""The adaptor's patches around what MindSpeed puts in their place.

MindSpeed makes a patched function anew at each application: what it first found, or what was registered to
replace that, within all wrappers that were registered, the last one outermost. What it first found has our
wrapper in it; a replacement has not, and not every wrapper calls what it wraps (that of MindSpeed-LLM around
`save_checkpoint` does not). So ours is registered once more, to be outermost: by a feature that comes last,
and in versions without features right before each application.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from adaptor import patching

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def come_last(features: list[Any]) -> None:
    """Put our feature to the end of MindSpeed's list: it then knows what all others have registered."""
    from adaptor.patches._mindspeed_feature import PatchesSurvive

    mine = next((feature for feature in features if isinstance(feature, PatchesSurvive)), None)
    if mine is not None:
        features.remove(mine)
    features.append(mine or PatchesSurvive())


def has_features() -> bool:
    """Whether this version has a manager of features; up to 2.0 it has a manager of patches alone."""
    try:
        return importlib.util.find_spec("mindspeed.features_manager.features_manager") is not None
    except ModuleNotFoundError:  # of the package: ModelLink 1.2 has a MindSpeed without
        return False


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
