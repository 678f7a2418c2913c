"""The operators that MindSpeed builds from C++ (`mindspeed.op_builder`), in the arithmetic of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

from torch_npu.operators import npu_apply_adam_w


def reuse_data_ptr(des: torch.Tensor, src: torch.Tensor, offset: int) -> None:
    """Let `des` have the memory of `src`, from element `offset` of the type of `des` on."""
    if offset < 0 or (offset + des.numel()) * des.element_size() > src.numel() * src.element_size():
        raise RuntimeError(f"Offsets overflow, got: offset {offset}")
    with torch.no_grad():
        des.set_(src.untyped_storage(), offset, des.shape, des.stride())  # type: ignore[call-overload]


def npu_apply_fused_adamw_v2(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    max_exp_avg_sq: torch.Tensor,
    state_step: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """AdamW in place; `state_step` counts this update, too."""
    powers = [beta ** (int(state_step) - 1) for beta in (beta1, beta2)]
    npu_apply_adam_w(
        *(*powers, lr, weight_decay, beta1, beta2, eps, grad, None, amsgrad, maximize),
        out=(param, exp_avg, exp_avg_sq),
    )


_BUILT = {
    "algorithm": SimpleNamespace(reuse_data_ptr=reuse_data_ptr),
    "npu_apply_fused_adamw_v2": SimpleNamespace(npu_apply_fused_adamw_v2=npu_apply_fused_adamw_v2),
}
_load = cpp_extension.load


def load(name: str, *args: Any, **kwargs: Any) -> Any:
    """Build an extension as torch does, but for the operators above."""
    return _BUILT.get(name) or _load(name, *args, **kwargs)


cpp_extension.load = load
