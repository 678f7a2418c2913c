"""Served as the modules of apex by this package: optimizers and a layer norm in torch's own arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import SGD as FusedSGD
from torch.optim.adam import adam
from torch.optim.adamw import adamw

__all__ = ["FusedAdam", "FusedSGD"]


class FusedAdam(torch.optim.Optimizer):
    """AdamW (Adam, if `adam_w_mode` is off) that counts its steps in `group["step"]`."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("capturable is True: there are no CUDA graphs on the device cpu")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            steps_done = group.get("step", 0)
            group["step"] = steps_done + 1
            params = [param for param in group["params"] if param.grad is not None]
            states = [self.state[param] for param in params]
            for param, state in zip(params, states, strict=True):
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
            beta1, beta2 = group["betas"]
            self._update(
                params,
                [param.grad for param in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [torch.tensor(float(steps_done)) for _ in params],
                # No fused kernel: what it makes of an element may depend on where the shard was cut.
                foreach=False,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss


class FusedLayerNormAffineFunction:
    """The part of apex's autograd function used by callers: `apply`, and the signature of `forward`."""

    @staticmethod
    def apply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Sequence[int],
        eps: float,
    ) -> torch.Tensor:
        return torch.nn.functional.layer_norm(input, list(normalized_shape), weight, bias, eps)

    forward = apply
