"""Operators of torch_npu, in torch's own arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: torch.Tensor,
    max_grad_norm: torch.Tensor | None,
    amsgrad: bool,
    maximize: bool,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """AdamW on `out`, the param and its two moments; `beta1_power` is beta1 to the count of earlier ones."""
    if amsgrad or max_grad_norm is not None:
        raise NotImplementedError("amsgrad")
    param, first, second = out
    grad = -grad if maximize else grad
    first.mul_(beta1).add_(grad, alpha=1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (second / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
    param.mul_(1 - lr * weight_decay).addcdiv_(first, denominator, value=-lr / (1 - beta1_power * beta1))
    return param, first, second


def npu_scaled_masked_softmax(
    x: torch.Tensor, mask: torch.Tensor, scale: float = 1.0, fixed_triu_mask: bool = False
) -> torch.Tensor:
    """Softmax over the last dimension; True in `mask` leaves an element out."""
    if fixed_triu_mask:
        raise NotImplementedError("fixed_triu_mask")
    return torch.softmax((x.float() * scale).masked_fill(mask, -10000.0), dim=-1).to(x.dtype)


def npu_confusion_transpose(
    x: torch.Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool
) -> torch.Tensor:
    """Transpose and reshape, in the order that was asked for."""
    if transpose_first:
        return x.permute(*perm).contiguous().view(*shape)
    return x.view(*shape).permute(*perm)


def npu_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalized tensor, and the reciprocal of its root mean square."""
    reciprocal = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * reciprocal).to(x.dtype) * gamma, reciprocal


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """x times the sigmoid of 1.702 x."""
    return x * torch.sigmoid(1.702 * x)


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of halves."""
    first_half, second_half = torch.chunk(x, 2, dim=-1)
    return x * cos + torch.cat((-second_half, first_half), dim=-1) * sin


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sigmoid-weighted first half times the second half."""
    gate, value = torch.chunk(x, 2, dim=dim)
    return torch.nn.functional.silu(gate) * value


def npu_clear_float_status(status: torch.Tensor) -> torch.Tensor:
    """Eight flags of the device; a CPU has none."""
    return torch.zeros_like(status)


def npu_get_float_status(status: torch.Tensor) -> torch.Tensor:
    """As `npu_clear_float_status`: no overflow was flagged."""
    return torch.zeros_like(status)
