"""Optimizers with fp32 main params."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascendspeed import get_args
from ascendspeed.core import parallel_state


class MegatronOptimizer:
    grad_scaler = None
    params_dtype = torch.bfloat16

    def __init__(self, optimizer: torch.optim.Optimizer, models: list[Any]) -> None:
        self.optimizer, self.models = optimizer, models

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def get_parameters(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def clip_grad_norm(self, clip_grad: float) -> float:
        grads = [param.grad for param in self.get_parameters()]
        total = torch.stack([torch.norm(grad) ** 2 for grad in grads]).sum()
        if get_args().use_distributed_optimizer:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        norm = total.item() ** 0.5
        if norm > clip_grad:
            for grad in grads:
                grad.mul_(clip_grad / norm)
        return norm

    def get_loss_scale(self) -> torch.Tensor:
        return torch.ones(1)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.get_loss_scale() * loss

    def count_zeros(self) -> float:
        zeros = torch.stack([(param.grad == 0).sum() for param in self.get_parameters()]).sum().float()
        dist.all_reduce(zeros)
        return zeros.item()

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        for model in self.models:
            for buffer in model._grad_buffers.values():
                buffer.data /= parallel_state.get_data_parallel_world_size()
                dist.all_reduce(buffer.data, group=parallel_state.get_data_parallel_group())

    def gather_model_params(self, args: Any, timers: Any) -> None:
        """Every rank has them."""


class MixedPrecisionOptimizer(MegatronOptimizer):
    @torch.no_grad()
    def step(self, args: Any, timers: Any) -> tuple[bool, float, float]:
        self._copy_model_grads_to_main_grads()
        norm, zeros = self.clip_grad_norm(args.clip_grad), self.count_zeros()
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        return True, norm, zeros


class Float16OptimizerWithFloat16Params(MegatronOptimizer):
    def __init__(self, optimizer: torch.optim.Optimizer, models: list[Any]) -> None:
        super().__init__(optimizer, models)
        (group,) = optimizer.param_groups
        self.float16_groups = [group["params"]]
        group["params"] = [param.detach().float() for param in group["params"]]
        self.fp32_from_float16_groups = [group["params"]]

    @torch.no_grad()
    def step(self, args: Any, timers: Any) -> tuple[bool, float, float]:
        for param, main in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            main.grad = param.main_grad.clone()
        norm, zeros = self.clip_grad_norm(args.clip_grad), self.count_zeros()
        self.optimizer.step()
        self._copy_main_params_to_model_params()
        return True, norm, zeros

    def _copy_main_params_to_model_params(self) -> None:
        for param, main in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            param.copy_(main)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        for param, main in zip(self.float16_groups[0], self.fp32_from_float16_groups[0], strict=True):
            main.copy_(param)

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "fp32_from_fp16_params": self.fp32_from_float16_groups,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(saved["optimizer"])
