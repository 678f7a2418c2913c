"""The losses of a step as a few numbers, kept by a rank after each step for the line of the step's log.

Reading numbers on the host takes a tenth of the time of a sum: at this point torch's code for sums is in no
CPU cache. So the losses of each micro-batch are kept, and summed only where a line has to be written again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# What is kept of a step at most: so many losses, each of so many numbers (a sum, and a number of tokens). The
# board has room for twice as much.
MOST_LOSSES = 24
_MOST_NUMBERS = 2

# Of each loss the type of its numbers, and those of each micro-batch; a tuple is a list when it is read.
Kept = Mapping[str, Sequence[Any]]
_NAMES: dict[torch.dtype, str] = {}


def are_few(losses: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the losses of each micro-batch can be kept separately: few, and on the host.

    Args:
        losses: of each micro-batch, by name.

    Raises:
        Exception: the losses have another form.
    """
    if not losses:
        return True
    if len(losses) * len(losses[0]) > MOST_LOSSES:
        return False
    for value in losses[0].values():
        # Reading from a device is waiting for it, so it is read once.
        if not isinstance(value, torch.Tensor) or not value.is_cpu or value.numel() > _MOST_NUMBERS:
            return False
    return True


def of(losses: Sequence[Mapping[str, torch.Tensor]]) -> Kept:
    """Return the losses of micro-batches as numbers.

    Raises:
        Exception: they are no tensors.
    """
    kept = {}
    for name in losses[0] if losses else ():
        values = [micro_batch_losses[name] for micro_batch_losses in losses]
        kept[name] = (_name(values[0]), [value.tolist() for value in values])
    return kept


def read(kept: Kept, device: torch.device | str) -> list[dict[str, torch.Tensor]]:
    """Return the losses that `of` was given, on `device`."""
    losses: list[dict[str, torch.Tensor]] = []
    for name, (kind, values) in kept.items():
        losses = losses or [{} for _ in values]
        for batch_losses, value in zip(losses, values, strict=True):
            batch_losses[name] = _tensor(kind, value, device)
    return losses


def of_sums(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the framework's sums as numbers: sums that are tensors are returned with their type.

    Raises:
        AttributeError: something is neither a number nor a tensor.
    """
    return {
        name: value if isinstance(value, (int, float)) else (_name(value), value.tolist())
        for name, value in sums.items()
    }


def read_sums(kept: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return what `of_sums` was given, with tensors on `device`."""
    return {
        name: value if isinstance(value, (int, float)) else _tensor(value[0], value[1], device)
        for name, value in kept.items()
    }


def _name(value: torch.Tensor) -> str:
    name = _NAMES.get(value.dtype)
    if name is None:
        name = _NAMES[value.dtype] = str(value.dtype).removeprefix("torch.")
    return name


def _tensor(kind: str, value: Any, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(value, dtype=getattr(torch, kind), device=device)
