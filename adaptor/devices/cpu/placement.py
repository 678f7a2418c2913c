"""Placement of tensors (every cuda and npu device means the CPU) and replacement of torch's functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch


def on_cpu(device: Any) -> Any:
    """The CPU for whatever names a cuda device (an index, "cuda:1", "npu", a torch.device), else `device`."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith(("cuda", "npu")) else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def rebind(owners: Any, name: str, effect: Callable[..., Any]) -> None:
    """Put `effect(original, ...)` in place of `name`, in `owners`: an object or a tuple of objects.

    Plain functions, no proxies: tensor factories and methods are called often, and a method binds as usual.
    """
    owners = owners if isinstance(owners, tuple) else (owners,)
    original = getattr(owners[0], name)

    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return effect(original, *args, **kwargs)

    for owner in owners:
        setattr(owner, name, redirected)


def replace(owners: tuple[Any, ...], stand_ins: Mapping[str, Callable[..., Any]]) -> None:
    """Put a function in place of each name of the table, in every owner.

    Each name gets its own function object: torch.compile looks functions up by identity at its import, and
    refuses a function with two names.
    """
    for name, stand_in in stand_ins.items():
        function = _another(stand_in)
        for owner in owners:
            setattr(owner, name, function)


def _another(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call
