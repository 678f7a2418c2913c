"""The functions by which Megatron-LM saves and loads the list of conversions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing

from modelopt.torch import opt


def save_modelopt_state(model: Sequence[Any], state_dict: dict[str, Any]) -> None:
    if opt.ModeloptStateManager.is_converted(model[0]):
        state_dict["modelopt_state"] = opt.modelopt_state(model[0])


def restore_modelopt_state(model: Sequence[Any], state_dict: Any) -> None:
    if "modelopt_state" in state_dict and not opt.ModeloptStateManager.is_converted(model[0]):
        raise NotImplementedError("the framework itself does not load a student in the format torch")


def save_sharded_modelopt_state(
    model: Sequence[Any], checkpoint_name: str | Path, sharded_strategy: Any = None
) -> None:
    if not opt.ModeloptStateManager.is_converted(model[0]):
        return
    folder = Path(checkpoint_name) / "modelopt_state"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(copy.deepcopy(opt.modelopt_state(model[0])), str(folder), sharded_strategy)


def restore_sharded_modelopt_state(model: list[Any], checkpoint_name: str | Path) -> None:
    folder = Path(checkpoint_name) / "modelopt_state"
    if folder.exists() and not opt.ModeloptStateManager.is_converted(model[0]):
        model[0] = opt.restore_from_modelopt_state(
            model[0], dist_checkpointing.load_common_state_dict(str(folder))
        )
