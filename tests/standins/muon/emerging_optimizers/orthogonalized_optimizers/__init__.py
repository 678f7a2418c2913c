"""The base class of Muon: its state and its update, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """SGD with an orthogonalized momentum; the arguments are those of 0.1."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        *,
        use_nesterov: bool,
        weight_decay: float,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
    ) -> None:
        self.use_nesterov = use_nesterov
        self.weight_decay_method = weight_decay_method
        self.fp32_matmul_prec = fp32_matmul_prec
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                momentum = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum_beta"])
                used = param.grad.lerp(momentum, group["momentum_beta"]) if self.use_nesterov else momentum
                param.add_(self.orthogonalize(param, used, **options), alpha=-group["lr"])

    def orthogonalize(self, param: torch.Tensor, grad: torch.Tensor, **options: Any) -> torch.Tensor:
        raise NotImplementedError("Megatron-core's subclass has it")


def get_muon_scale_factor(rows: int, columns: int, mode: str) -> float:
    """Return the factor of `mode` spectral."""
    assert mode == "spectral", mode
    return float(max(rows, columns) ** 0.5)
