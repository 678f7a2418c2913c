"""What all modules with fp8 state have."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

_KEYS = ("scaling_fwd", "scaling_bwd")


class DelayedScalingRecipeState:
    """The scales of one direction, and the largest elements from which they are chosen."""

    def __init__(self, recipe: Any, *, mode: str, num_quantizers: int) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers
        is_wide = mode == "backward" and recipe.fp8_format.name == "HYBRID"
        self.dtype = torch.float8_e5m2 if is_wide else torch.float8_e4m3fn
        self.scale = torch.ones(num_quantizers)
        self.amax_history = torch.zeros(recipe.amax_history_len, num_quantizers)

    def make_quantizers(self) -> list[Float8Quantizer]:
        return [
            Float8Quantizer(self.scale[place], self.amax_history[0][place].reshape((1,)), self.dtype)
            for place in range(self.num_quantizers)
        ]


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = self.fp8 = self.fp8_calibration = self.fp8_meta_tensors_initialized = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers: dict[str, Any] = {key: {} for key in _KEYS}
        self._fp8_workspaces: dict[str, torch.Tensor] = {}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8 = self.fp8_meta["fp8_checkpoint"] = FP8GlobalStateManager.is_fp8_enabled()
        if not self.fp8:
            self.fp8_initialized = False
            return
        recipe = FP8GlobalStateManager.recipe
        if self.fp8_initialized and recipe == self.fp8_meta["recipe"]:
            return
        self.fp8_meta["recipe"] = recipe
        self.fp8_meta["num_gemms"] = num_gemms
        self.fp8_meta["fp8_group"] = FP8GlobalStateManager.group
        self.fp8_meta["fp8_max_fwd"] = recipe.fp8_format.value.max_fwd
        self.fp8_meta["fp8_max_bwd"] = recipe.fp8_format.value.max_bwd
        self.init_fp8_meta_tensors(recipe)
        self.fp8_initialized = True

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        if self.fp8_meta_tensors_initialized or not recipe.delayed():
            return
        for key, mode, tensors in zip(_KEYS, ("forward", "backward"), (3, 2), strict=True):
            count = self.fp8_meta["num_gemms"] * tensors
            self.fp8_meta[key] = DelayedScalingRecipeState(recipe, mode=mode, num_quantizers=count)
            self.quantizers[key] = self.fp8_meta[key].make_quantizers()
        self.fp8_meta_tensors_initialized = True

    @torch.no_grad()
    def reset_fp8_meta_tensors(self) -> None:
        for key in _KEYS:
            if key in self.fp8_meta:
                self.fp8_meta[key].scale.fill_(1)
                self.fp8_meta[key].amax_history.fill_(0)

    def prepare_forward(self, num_gemms: int = 1) -> bool:
        """Return whether the module computes with delayed scaling."""
        self.init_fp8_metadata(num_gemms)
        if not self.fp8 or not self.fp8_meta["recipe"].delayed():
            return False
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        return True

    def get_extra_state(self) -> torch.Tensor:
        """Return the state of delayed scaling; other recipes keep nothing from one step to the next."""
        if not self.fp8_meta["fp8_checkpoint"] or not self.fp8_meta["recipe"].delayed():
            return torch.empty(0, dtype=torch.uint8)
        state = {"recipe": self.fp8_meta["recipe"]}
        for key, name in zip(_KEYS, ("fwd", "bwd"), strict=True):
            state[f"scale_{name}"] = self.fp8_meta[key].scale.clone()
            state[f"amax_history_{name}"] = self.fp8_meta[key].amax_history.clone()
        state["extra_fp8_variables"] = {
            key: value
            for key, value in self.fp8_meta.items()
            if key != FP8GlobalStateManager.get_buffer_info()
            and isinstance(value, (bool, int, float, str, tuple, list))
        }
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    @torch.no_grad()
    def set_extra_state(self, state: Any) -> None:
        if state is None or state.numel() == 0:
            return
        state = pickle.loads(state.numpy().tobytes())
        self.fp8_meta.update(state["extra_fp8_variables"])
        self.fp8_meta["recipe"] = state["recipe"]
        self.init_fp8_meta_tensors(self.fp8_meta["recipe"])
        for key, name in zip(_KEYS, ("fwd", "bwd"), strict=True):
            self.fp8_meta[key].scale.copy_(state[f"scale_{name}"])
            self.fp8_meta[key].amax_history.copy_(state[f"amax_history_{name}"])


def get_dummy_wgrad(*_args: Any) -> Any:
    raise NotImplementedError("this stand-in adds no gradients up by itself")
