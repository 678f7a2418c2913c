"""Adam with moments of fewer bits, in torch's own arithmetic on an element."""

from __future__ import annotations

from typing import Any

import torch

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedSGD(torch.optim.SGD):
    pass


class FusedAdam(torch.optim.Optimizer):
    """AdamW; counts its steps in `group["step"]`. Moments in bfloat16 are rounded behind each update.

    `_scales` has a number for each state that is not in float32, also in bfloat16, which needs none.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if master_weights or use_decoupled_grad:
            raise NotImplementedError("this stand-in has no main params of its own")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.capturable = False
        self.master_weights = master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def _initialize_state(self, param: torch.Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool = False) -> None:
        for name in _MOMENTS:
            self._initialize_state(param, name)

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[param][name].float()

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        assert unscaled.dtype == torch.float32
        if name not in self.state[param]:
            self._initialize_state(param, name)
        self.state[param][name].copy_(unscaled)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for number, state in saved["state"].items():
            saved["state"][number] = {name: value.float() for name, value in state.items()}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(ids, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    self.set_scaled_state(param, name, value.float())

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param)
                if param.grad is None:
                    continue
                for name in _MOMENTS:
                    if self.name_to_dtype_map[name] != torch.float32:
                        assert self._scales[param][name] is not None
                first, second = (self.get_unscaled_state(param, name) for name in _MOMENTS)
                first.mul_(beta1).add_(param.grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                update = first / (1 - beta1 ** group["step"]) / root
                param.sub_(group["lr"] * (update + group["weight_decay"] * param))
                self.state[param]["exp_avg"].copy_(first)
                self.state[param]["exp_avg_sq"].copy_(second)


def multi_tensor_scale(_chunk: int, _overflow: Any, lists: Any, scale: Any) -> None:
    for source, into in zip(*lists, strict=True):
        into.copy_(source * scale)


def multi_tensor_l2norm(
    _chunk: int, _overflow: Any, lists: Any, per_tensor: bool
) -> tuple[torch.Tensor, None]:
    assert not per_tensor
    norms = [tensor.float().norm() for tensor in lists[0]]
    return (torch.stack(norms).norm().reshape(1) if norms else torch.zeros(1)), None


def multi_tensor_applier(operation: Any, overflow: Any, lists: Any, *args: Any) -> Any:
    return operation(2048 * 32, overflow, lists, *args)


__all__ = ["FusedAdam", "FusedSGD", "multi_tensor_applier", "multi_tensor_l2norm", "multi_tensor_scale"]
