"""Registers the adaptor's patches around MindSpeed's replacements.

MindSpeed makes a patched function anew at each application: from the original function or the registered
replacement, within all registered wrappers, the last wrapper outermost. The original function contains the
adaptor's wrapper; a replacement does not, and some wrappers do not call the wrapped function (for example
MindSpeed-LLM's around `save_checkpoint`). So ours is registered once more, to be outermost: by a feature that
comes last, and in versions without features right before each application.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from adaptor import patching
from adaptor.frameworks import supported_options
from adaptor.hooks import WorkerHooks

# As `supported_options` has them for Megatron-LM.
ALLOWED_VALUES: supported_options.Values = (
    ("virtual_optimizer", (None,), "optimizer state that is on the host between updates"),
    ("smart_swap", (False, None), "tensors that are on the host when they are not used"),
    ("compress_optimizer", (False, None), "compressed optimizer state"),
    ("quant_states", (None,), "optimizer state in 8 bits"),
    ("quant_grads", (False, None), "gradients with scales of their own"),
    ("optimizer_selection", ("fused_adamw", "fused_torch_adamw"), "an average of the weights (EMA)"),
    ("use_ema", (False, None), "an average of the weights (EMA)"),
    ("layerzero", (False, None), "LayerZero, which cuts weights and gradients,"),
    ("enable_zero3", (False, None), "ZeRO-3, which cuts weights and gradients,"),
    ("enable_expert_placement", (False, None), "experts that move from rank to rank"),
)

# The options with which main params have other memory between updates than in them (`mindspeed_memory`).
_MEMORY_OPTIONS = ("reuse_fp32_param", "swap_optimizer")

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


class MindspeedHooks(WorkerHooks):
    """The options of MindSpeed, and its storages of optimizer state (`mindspeed_memory`)."""

    def checks(self, args: Any, *, begins: bool) -> Iterator[Callable[[], None]]:
        yield from supported_options.checks_of_values(ALLOWED_VALUES, args)
        for name in _MEMORY_OPTIONS:
            if getattr(args, name, False):
                yield partial(_require_restorable, args, name)

    def memory_of(self, optimizer: Any) -> Any:
        from adaptor.frameworks import mindspeed_memory  # torch, which is for the script to import

        return mindspeed_memory.attach(optimizer)


def _require_restorable(args: Any, name: str) -> None:
    supported_options.require_restorable(
        args,
        name,
        (
            name == "swap_optimizer"
            and (getattr(args, "ckpt_format", "torch") != "torch" or getattr(args, "use_dist_ckpt", False)),
            "with another --ckpt-format than torch, in which MindSpeed's own saves fail",
        ),
        (
            supported_options.writes_torch_dist(args),
            "in torch_dist from Megatron-core 0.13 on, in which last words would lack a part of it",
        ),
        (
            getattr(args, "reuse_fp32_param", False) and getattr(args, "npu_deterministic", False),
            "with --npu-deterministic, which keeps a bit of each main param in the sign of a moment",
        ),
    )


def has_features() -> bool:
    """Return True if MindSpeed has a manager of features, which calls ours (after version 2.0)."""
    module = sys.modules.get("mindspeed.features_manager.features_manager")
    manager = getattr(module, "MindSpeedFeaturesManager", None)
    return hasattr(manager, "apply_features_patches")


def be_outermost(entry: Any) -> None:
    """Make our patch the outermost wrapper of an entry that MindSpeed's patch manager is about to apply."""
    name = f"{entry.orig_module_name}.{entry.orig_func_name}"
    own_targets = [(group, target) for group, target in targets() if target.replace(":", ".") == name]
    if own_targets:
        other_wrappers = [wrapper for wrapper in entry.wrappers if not hasattr(wrapper, "of_ttp")]
        entry.wrappers[:] = [
            *other_wrappers,
            *(outermost(entry, group, target) for group, target in own_targets),
        ]


def targets() -> Iterator[tuple[str, str]]:
    """Return the group and the target of each patch of ours, by which a function is named."""
    for group in ("ttp", "online"):
        for target in dict.fromkeys(patching.targets(group)):
            yield group, target


def outermost(entry: Any, group: str, target: str) -> Wrap:
    """Return the adaptor's patch of a function as a wrapper for MindSpeed's patch manager."""

    # It tells a wrapper by the end of its name.
    def patches_survive_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
        return patching.around(group, target, function, entry.patch_func)

    patches_survive_wrapper.of_ttp = True  # type: ignore[attr-defined]
    return patches_survive_wrapper


def come_last(features: list[Any]) -> None:
    """Put our feature to the end of MindSpeed's list, where it sees the registrations of all others."""
    from mindspeed.features_manager.feature import MindSpeedFeature

    own_feature = next((feature for feature in features if hasattr(feature, "of_ttp")), None)
    if own_feature is not None:
        features.remove(own_feature)
        features.append(own_feature)
        return

    class PatchesSurvive(MindSpeedFeature):  # type: ignore[misc]
        """Registers a wrapper for each function patched by the adaptor and by another feature."""

        of_ttp = True

        def __init__(self) -> None:
            super().__init__("ttp-adaptor", optimization_level=0)  # level 0: always
            self._wraps: dict[tuple[str, str], Wrap] = {}

        def register_patches(self, patch_manager: Any, args: Any) -> None:
            for group, target in targets():
                name = target.replace(":", ".")
                entry = patch_manager.patches_info.get(name)
                if entry is not None:
                    # The same object each time: what is registered already is not registered again.
                    wrap = self._wraps.setdefault((group, name), outermost(entry, group, target))
                    patch_manager.register_patch(name, wrap)

    features.append(PatchesSurvive())
