"""Our feature among those of MindSpeed; imported once MindSpeed is."""

from __future__ import annotations

from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature

from adaptor.frameworks.mindspeed_wrappers import Wrap, outermost, targets


class PatchesSurvive(MindSpeedFeature):  # type: ignore[misc]
    """Registers a wrapper for each function patched by the adaptor and by another feature of MindSpeed."""

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


def come_last(features: list[Any]) -> None:
    """Put our feature to the end of MindSpeed's list: the feature then sees the registrations of all
    others.
    """
    own_feature = next((feature for feature in features if isinstance(feature, PatchesSurvive)), None)
    if own_feature is not None:
        features.remove(own_feature)
    features.append(own_feature or PatchesSurvive())
