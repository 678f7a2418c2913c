"""The search for numbers that are not finite: signs of diverging training or of a failing device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from adaptor.checkpoint import shards

# The number of names that are printed.
_TOLD = 3


def is_finite(tensor: torch.Tensor) -> bool:
    """Tell whether no element is nan or infinite; reads the tensor once and allocates nothing."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(math.isfinite(bound) for bound in torch.stack(torch.aminmax(tensor.detach())).tolist())


def all_finite(value: Any) -> bool:
    """Tell whether all tensors of a nested state are finite."""
    return all(map(is_finite, _tensors(value)))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def bad_shards(optimizer: Any, state: Mapping[Any, Any]) -> dict[int, list[str]]:
    """Find the shards of a distributed optimizer's gathered state that are not finite; the bad keys of each.

    Each world tensor is read once; only one that is not finite is examined shard by shard.
    """
    keys_by_shard: dict[int, list[str]] = {}
    for number, buffer in enumerate(optimizer.buffers):
        (world,) = state[number].values()
        for key in shards.KEYS:
            if is_finite(world[key]):
                continue
            for bucket in shards.buckets_of(optimizer, buffer):
                for index in range(shards.shard_of(optimizer)[1]):
                    keys = keys_by_shard.setdefault(index, [])
                    if key not in keys and not is_finite(world[key][slice(*bucket.extent(index))]):
                        keys.append(key)
    return {index: keys for index, keys in sorted(keys_by_shard.items()) if keys}


def words(things: list[str]) -> str:
    """Describe bad things, some by name: "a, b, c and 4 more are not finite"; empty for none."""
    if not things:
        return ""
    omitted = len(things) - _TOLD
    shown = ", ".join(things[:_TOLD]) + (f" and {omitted} more" if omitted > 0 else "")
    return f"{shown} {'is' if len(things) == 1 else 'are'} not finite"
