"""The list of a model's conversions, which every save has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import modelopt

_UNSAVED = ("kd_loss",)


class ModeloptStateManager:
    """The list of a model's conversions: `_modelopt_state` of the model."""

    def __init__(self, model: Any, init_state: bool = False) -> None:
        if init_state:
            model._modelopt_state = []
        self._state: list[tuple[str, Any]] = model._modelopt_state

    @staticmethod
    def is_converted(model: Any) -> bool:
        return any(hasattr(module, "_modelopt_state") for module in model.modules())


def modelopt_state(model: Any) -> dict[str, Any]:
    saved = [conversion for conversion in model._modelopt_state if conversion[0] not in _UNSAVED]
    return {"modelopt_state_dict": saved, "modelopt_version": modelopt.__version__}


def restore_from_modelopt_state(model: Any, state: Mapping[str, Any]) -> Any:
    if state["modelopt_state_dict"]:
        raise NotImplementedError("this stand-in repeats no conversion")
    ModeloptStateManager(model, init_state=True)
    return model
