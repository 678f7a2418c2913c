"""Adam with moments of fewer bits, in torch's own arithmetic on an element."""

from __future__ import annotations

from typing import Any

import torch

_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedSGD(torch.optim.SGD):
    pass


class FusedAdam(torch.optim.Optimizer):
    """AdamW; counts its steps in `group["step"]`. Moments in bfloat16 are rounded behind each update.

    `_scales` has a number for each state that is not in float32, also in bfloat16, which needs none. With
    `master_weights` the state of a weight has its main param, or the lower half of the main param's bits.
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
        adam_w_mode: bool = True,
    ) -> None:
        if not adam_w_mode:
            raise NotImplementedError("this stand-in is AdamW")
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
        self.store_param_remainders = (
            store_param_remainders and master_weights and master_weight_dtype == torch.float32
        )
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def _has_remainder(self, param: torch.Tensor, name: str = "master_param") -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def _initialize_state(self, param: torch.Tensor, name: str) -> None:
        dtype = torch.int16 if self._has_remainder(param, name) else self.name_to_dtype_map[name]
        self.state[param][name] = torch.zeros_like(param, dtype=dtype)
        if dtype in (torch.float16, torch.bfloat16):
            self._scales.setdefault(param, {})[name] = torch.ones(1)

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        assert store_param_remainders == self._has_remainder(param)
        for name in _MOMENTS:
            self._initialize_state(param, name)
        if self.master_weights:
            self._initialize_state(param, "master_param")
            if not store_param_remainders:
                self.set_scaled_state(param, "master_param", param.detach().float())

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        value = self.state[param][name]
        return value if self._has_remainder(param, name) else value.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        assert unscaled.dtype == (torch.int16 if self._has_remainder(param, name) else torch.float32)
        if name not in self.state[param]:
            self._initialize_state(param, name)
        self.state[param][name].copy_(unscaled)

    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        params = dict(enumerate(param for group in self.param_groups for param in group["params"]))
        for number, state in saved["state"].items():
            saved["state"][number] = {name: self.get_unscaled_state(params[number], name) for name in state}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        for number, param in zip(ids, params, strict=True):
            if number in state_dict["state"]:
                self.state[param] = {}
                for name, value in state_dict["state"][number].items():
                    has_remainder = self._has_remainder(param, name)
                    self.set_scaled_state(param, name, value if has_remainder else value.float())

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._has_remainder(param))
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is None:
                    continue
                for name in _MOMENTS:
                    if self.name_to_dtype_map[name] != torch.float32:
                        assert self._scales[param][name] is not None
                grad, main = grad.float(), self._main(param)
                first, second = (self.get_unscaled_state(param, name) for name in _MOMENTS)
                first.mul_(beta1).add_(grad, alpha=1 - beta1)
                second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                root = (second / (1 - beta2 ** group["step"])).sqrt_().add_(group["eps"])
                update = first / (1 - beta1 ** group["step"]) / root
                main.sub_(group["lr"] * (update + group["weight_decay"] * main))
                self.state[param]["exp_avg"].copy_(first)
                self.state[param]["exp_avg_sq"].copy_(second)
                self._make_weight(param, main)

    def _main(self, param: torch.Tensor) -> torch.Tensor:
        """Return the number that an update changes."""
        if not self.master_weights or param.dtype == torch.float32:
            return param
        if not self._has_remainder(param):
            return self.state[param]["master_param"]
        lower = self.state[param]["master_param"]
        upper = param.view(torch.int16) - (lower < 0).to(torch.int16)
        return torch.stack((lower, upper), -1).view(torch.float32).reshape(param.shape)

    def _make_weight(self, param: torch.Tensor, main: torch.Tensor) -> None:
        if self._has_remainder(param):
            lower, upper = main.view(torch.int16).view(-1, 2).unbind(-1)
            self.state[param]["master_param"].copy_(lower)
            param.copy_((upper + (lower < 0).to(torch.int16)).view(torch.bfloat16))
        elif main is not param:
            param.copy_(main)


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
