"""A twin: a torch optimizer that equals another in all but its params and their state."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch

# The attribute of an optimizer that names where its state is (`optimizer_state.Storage`).
STORAGE = "_ttp_storage"


def make(
    owner: torch.optim.Optimizer, params: Sequence[list[torch.Tensor]], groups: Sequence[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Make an optimizer of the class of `owner` with other params, without state and without hooks.

    The class is not called: the arguments of a constructor are not always among its `defaults`.

    Args:
        params: the params of each param group.
        groups: the other entries of each param group.
    """
    twin: torch.optim.Optimizer = object.__new__(type(owner))
    # A scheduler of torch counts the steps by a `step` of the object's own.
    left_out = ("step", STORAGE)
    twin.__dict__.update({key: value for key, value in vars(owner).items() if key not in left_out})
    twin.state = defaultdict(dict)
    if hasattr(owner, "_scales"):  # of Transformer Engine; `optimizer_state.make_state` fills it
        vars(twin)["_scales"] = {}
    twin.param_groups = [
        {"params": tensors, **scalars} for tensors, scalars in zip(params, groups, strict=True)
    ]
    twin._optimizer_step_pre_hooks = OrderedDict()
    twin._optimizer_step_post_hooks = OrderedDict()
    return twin


def params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all params, in the order of the param groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def scalars(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the entries of each param group besides its params, and besides classes, which never change."""
    return [
        {key: value for key, value in group.items() if key != "params" and not isinstance(value, type)}
        for group in optimizer.param_groups
    ]
