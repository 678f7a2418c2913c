"""Stands in for torch_npu where the device is the CPU: see ../README.md."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu import _C, built, npu
from torch_npu.attention import npu_fusion_attention, npu_fusion_attention_grad
from torch_npu.operators import (
    fast_gelu,
    npu_apply_adam_w,
    npu_clear_float_status,
    npu_confusion_transpose,
    npu_get_float_status,
    npu_rms_norm,
    npu_rotary_mul,
    npu_scaled_masked_softmax,
    npu_swiglu,
)
from torch_npu.utils import collect_env, storage

__all__ = [
    "_C",
    "built",
    "collect_env",
    "fast_gelu",
    "npu",
    "npu_apply_adam_w",
    "npu_clear_float_status",
    "npu_confusion_transpose",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_get_float_status",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_scaled_masked_softmax",
    "npu_swiglu",
    "storage",
    "unsupported_dtype",
]
__version__ = "2.1.0"
unsupported_dtype: list[torch.dtype] = []  # that collectives of the NPU do not take


def _name_types_after_the_npu() -> None:
    """Frameworks pick params by comparing `tensor.type()` with "torch.npu.FloatTensor"."""
    named = torch.Tensor.type

    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return named(self).replace("torch.cuda.", "torch.npu.")
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.npu.", "torch.cuda.")
        return named(self, dtype, *args, **kwargs)

    torch.Tensor.type = type_of  # type: ignore[assignment,method-assign]


torch.npu = npu  # type: ignore[attr-defined]
# Where torch has no such function ModelLink makes a torch.device("npu"), which this torch does not know.
torch._C._cuda_setRNGState = torch.cuda.set_rng_state  # type: ignore[attr-defined]
torch.Tensor.npu = lambda self, *args, **kwargs: self  # type: ignore[attr-defined]
_name_types_after_the_npu()
