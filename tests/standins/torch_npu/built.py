"""The operators that MindSpeed builds from C++ (`mindspeed.op_builder`), in the arithmetic of torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import cpp_extension

from torch_npu.operators import npu_apply_adam_w, npu_rotary_mul


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


def npu_rotary_position_embedding(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mode: int = 0
) -> torch.Tensor:
    """Rotary embedding of halves."""
    if mode:
        raise NotImplementedError("interleaved")
    return npu_rotary_mul(x, cos, sin)


def _groups(group_list: Any, group_list_type: int) -> list[slice]:
    """Return the rows of each group; the list has their ends (0) or their sizes (1)."""
    ends = torch.as_tensor(group_list)
    ends = (ends.cumsum(0) if group_list_type else ends).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def npu_gmm(
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    bias: list[torch.Tensor],
    group_list: Any,
    group_type: int,
    group_list_type: int,
) -> list[torch.Tensor]:
    """A product for each group of rows."""
    rows = _groups(group_list, group_list_type)
    return [torch.cat([x[0][part] @ weight[0][group] for group, part in enumerate(rows)])]


def npu_gmm_backward_fusion(
    grad: list[torch.Tensor], weight: list[torch.Tensor], group_list: Any, group_list_type: int
) -> Any:
    """The gradient of the rows of `npu_gmm` alone."""
    rows = _groups(group_list, group_list_type)
    return [torch.cat([grad[0][part] @ weight[0][group].t() for group, part in enumerate(rows)])], [], []


def npu_gmm_backward(
    grad: list[torch.Tensor],
    x: list[torch.Tensor],
    weight: list[torch.Tensor],
    group_list: Any,
    group_list_type: int,
) -> Any:
    """The gradients of `npu_gmm`."""
    rows = _groups(group_list, group_list_type)
    of_weight = torch.stack([x[0][part].t() @ grad[0][part] for part in rows])
    return npu_gmm_backward_fusion(grad, weight, group_list, group_list_type)[0], [of_weight], []


_GROUPED = SimpleNamespace(
    npu_gmm=npu_gmm, npu_gmm_backward=npu_gmm_backward, npu_gmm_backward_fusion=npu_gmm_backward_fusion
)
_BUILT = {
    "npu_rotary_position_embedding": SimpleNamespace(
        npu_rotary_position_embedding=npu_rotary_position_embedding
    ),
    "grouped_matmul": _GROUPED,
    "grouped_matmul_v2": _GROUPED,
    "algorithm": SimpleNamespace(reuse_data_ptr=reuse_data_ptr),
    "npu_apply_fused_adamw_v2": SimpleNamespace(npu_apply_fused_adamw_v2=npu_apply_fused_adamw_v2),
}
_load = cpp_extension.load


def load(name: str, *args: Any, **kwargs: Any) -> Any:
    """Build an extension as torch does, but for the operators above."""
    return _BUILT.get(name) or _load(name, *args, **kwargs)


cpp_extension.load = load
