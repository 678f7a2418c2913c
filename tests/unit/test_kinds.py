"""Optimizers whose state differs from torch's are copied, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.checkpoint.local_copy import LocalCopy
from adaptor.checkpoint.trainee import replicas_of
from adaptor.errors import UnsupportedError
from adaptor.replica import optimizer_state, twin


class FusedAdam(torch.optim.Optimizer):
    """An optimizer with a state like Transformer Engine's: `step` in the group, types and scales beside the
    state, and a `state_dict` that reads attributes of the optimizer.
    """

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, "bias_correction": True, "betas": (0.9, 0.99)})
        self.capturable = False
        self.master_weights = False
        self.use_decoupled_grad = False
        self.store_param_remainders = False
        self.exp_avg_dtype = self.exp_avg_sq_dtype = torch.float32
        self.types = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        self._scales: dict[Any, Any] = {}
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)
        vars(self).update(options)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                state = self.state[param]
                for name, kind in self.types.items():
                    moment = state.setdefault(name, torch.zeros_like(param, dtype=kind))
                    moment.mul_(0.9).add_(param.grad)
                param.data.sub_(state["exp_avg"], alpha=group["lr"] / group["step"])

    def state_dict(self) -> dict[str, Any]:
        body = super().state_dict()
        for number, param in enumerate(twin.params(self)):
            if param in self.state:
                body["state"][number] = {name: self.state[param][name].float() for name in self.types}
        return body


def fused_adam(**options: Any) -> FusedAdam:
    params = [torch.nn.Parameter(torch.arange(4.0)), torch.nn.Parameter(torch.ones(3))]
    return FusedAdam([{"params": params[:1]}, {"params": params[1:], "lr": 0.2}], **options)


def update(optimizer: torch.optim.Optimizer, number: int) -> None:
    for param in twin.params(optimizer):
        param.grad = torch.full_like(param, float(number))
    optimizer.step()


def test_a_count_in_the_group_goes_back_with_the_local_copy() -> None:
    optimizer = fused_adam()
    copy = LocalCopy(SimpleNamespace(optimizer=optimizer), [None])
    update(optimizer, 1)
    update(optimizer, 2)
    copy.take()
    expected = optimizer.state_dict()
    expected = {
        "groups": [{**group} for group in expected["param_groups"]],
        "state": [value.clone() for entry in expected["state"].values() for value in entry.values()],
    }
    update(optimizer, 3)
    kept = copy.optimizer.optimizer.state_dict()
    assert kept["param_groups"] == expected["groups"]
    assert [group["step"] for group in kept["param_groups"]] == [2, 2]
    values = [value for entry in kept["state"].values() for value in entry.values()]
    assert all(map(torch.equal, values, expected["state"]))
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


def test_a_twin_makes_the_same_updates() -> None:
    optimizer = fused_adam()
    params = [[param.detach().clone() for param in group["params"]] for group in optimizer.param_groups]
    twin_optimizer = twin.make(optimizer, params, twin.scalars(optimizer))
    for number in range(3):
        update(optimizer, number)
        update(twin_optimizer, number)
    assert all(map(torch.equal, twin.params(twin_optimizer), twin.params(optimizer)))
    assert twin_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda params: torch.optim.AdamW(params, fused=True),
    ],
    ids=["adam", "adamw", "sgd", "fused"],
)
def test_torch_s_optimizers_are_protected(kind: Callable[[Any], torch.optim.Optimizer]) -> None:
    optimizer_state.require_protected(kind([torch.nn.Parameter(torch.ones(2))]))


@pytest.mark.parametrize(
    ("option", "value", "meaning"),
    [
        ("capturable", True, "rates and counts are tensors"),
        ("use_master", True, "the optimizer has main params of its own"),
        ("master_weights", True, "the optimizer has main params of its own"),
        ("store_param_remainders", True, "main params are split in two"),
        ("use_decoupled_grad", True, "gradients are not where torch has them"),
        ("exp_avg_dtype", torch.uint8, "moments have scales outside of the state"),
        ("exp_avg_sq_dtype", torch.float16, "moments have scales outside of the state"),
    ],
)
def test_other_state_is_refused_when_training_begins(option: str, value: Any, meaning: str) -> None:
    chain = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=fused_adam(**{option: value}))])
    with pytest.raises(UnsupportedError) as refused:
        replicas_of(chain, 1, 1)
    assert str(refused.value).startswith(f"tests's FusedAdam has {option}={value}: {meaning}")
    assert "\n" not in str(refused.value)


def test_a_capturable_optimizer_of_torch_is_refused() -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(UnsupportedError, match="torch's AdamW has capturable=True"):
        optimizer_state.require_protected(optimizer)


def test_a_count_that_is_a_tensor_is_protected() -> None:
    optimizer = fused_adam()
    for group in optimizer.param_groups:
        group["step"] = torch.tensor(3)
    optimizer_state.require_protected(optimizer)


def test_a_rate_that_is_a_tensor_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(UnsupportedError, match="torch's SGD has a tensor as lr of a param group"):
        optimizer_state.require_protected(optimizer)
