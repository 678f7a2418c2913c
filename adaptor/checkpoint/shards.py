"""The shards of Megatron's distributed optimizer: their places, their tensors, and the search for NaNs.

A distributed optimizer keeps params in buffers, a buffer consists of buckets, and a bucket is padded to equal
shards, one for each rank of the data-parallel group. A *world tensor* is one whole buffer without the padding
of buckets, as `get_parameter_state_dp_zero` builds it. The transport of shards to the writing rank:
`shard_exchange.py`.

Numbers that are not finite are signs of diverging training or of a failing device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from adaptor.checkpoint import step_record
from adaptor.errors import CheckpointError
from adaptor.replica import optimizer_state
from adaptor.replica.mirror import Mirror, ParamPiece

KEYS = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Bucket:
    """A bucket of a buffer; all in elements.

    Attributes:
        offset: its start in the buffer
        world: its start in the world tensor
        unpadded: its size in the world tensor
        shard: the size of each of its shards, the last of which may be padding, in part or in whole
    """

    index: int
    offset: int
    world: int
    unpadded: int
    shard: int

    def extent(self, index: int) -> tuple[int, int]:
        """Return start and end of shard `index` in the world tensor; an empty range for padding alone."""
        start = min(index * self.shard, self.unpadded)
        return self.world + start, self.world + min(start + self.shard, self.unpadded)


def is_stub(optimizer: Any) -> bool:
    """Return True if an optimizer has no params on the rank; Megatron-core has such optimizers from 0.11
    on.
    """
    return getattr(optimizer, "is_stub_optimizer", False)


def is_sharded(optimizer: Any) -> bool:
    """Return True if an optimizer of the chain is a distributed optimizer with params on the rank."""
    return hasattr(optimizer, "buffers") and not is_stub(optimizer)


def shard_of(optimizer: Any) -> tuple[int, int]:
    """Return the index of the shard of an optimizer on the rank, and the number of shards; else (0, 1)."""
    if not is_sharded(optimizer):
        return 0, 1
    group = optimizer.data_parallel_group
    return group.rank(), group.size()


@dataclass(frozen=True)
class HeldShard:
    """A shard that this rank holds.

    Attributes:
        index: its number in its group, as in `Share.index`
        is_copy: whether it is a mirror's copy of another rank's shard
        optimizer: the torch optimizer with its params and state
    """

    index: int
    is_copy: bool
    optimizer: torch.optim.Optimizer


def held_shards(optimizer: Any, mirrors: Sequence[Mirror | None] = ()) -> list[HeldShard]:
    """Return the shards that this rank holds, its own and its copies.

    The shards of a group are the shards of the first optimizer of the chain, then of the second, ...

    Args:
        optimizer: the chain.
        mirrors: per optimizer of the chain: the copy of a neighbour's shard, or None; empty: none.
    """
    held, offset = [], 0
    for number, chained_optimizer in enumerate(step_record.chain(optimizer)):
        index, count = shard_of(chained_optimizer)
        if getattr(chained_optimizer, "optimizer", None) is not None:
            held.append(HeldShard(offset + index, False, chained_optimizer.optimizer))
        mirror = mirrors[number] if number < len(mirrors) else None
        if mirror is not None:
            held.append(HeldShard(offset + mirror.index, True, mirror.optimizer))
        offset += count
    return held


def buckets_of(optimizer: Any, buffer: Any) -> list[Bucket]:
    """Return the buckets of one buffer of a distributed optimizer.

    Raises:
        CheckpointError: the shards cannot share the elements of a bucket.
    """
    count = shard_of(optimizer)[1]
    buckets, world = [], 0
    for index, bucket in enumerate(buffer.buckets):
        numel = bucket.grad_data.numel()
        if numel % count:
            raise CheckpointError(f"bucket {index} has {numel} elements, which {count} shards cannot share")
        buckets.append(Bucket(index, bucket.offset, world, bucket.numel_unpadded, numel // count))
        world += bucket.numel_unpadded
    return buckets


def numel_of(buffer: Any) -> int:
    """Return the elements of a buffer without the padding of its buckets; not an attribute up to
    Megatron-core 0.7.
    """
    if hasattr(buffer, "numel_unpadded"):
        return int(buffer.numel_unpadded)
    return sum(bucket.numel_unpadded for bucket in buffer.buckets)


# A shard's part of a bucket: for each param start and end in the shard, and its tensors by key.
Part = Iterator[tuple[int, int, Mapping[str, torch.Tensor]]]


def part_of(optimizer: Any, number: int, bucket: int) -> Part:
    """Return the rank's part of a bucket.

    Args:
        optimizer: a distributed optimizer.
        number: of the buffer.
        bucket: its number in the buffer.
    """
    (ranges,) = optimizer.gbuf_ranges[number].values()
    for param, param_range in ranges[bucket]["param_map"].items():
        local = param_range["gbuf_local"]
        yield local.start, local.end, _tensors(optimizer, param)


def _tensors(optimizer: Any, param: Any) -> Mapping[str, torch.Tensor]:
    """Return the rank's part of a model's param and of its state, by key."""
    storage = optimizer_state.storage_of(optimizer)
    if storage is not None:
        group, order = optimizer.model_param_group_index_map[param]
        main = optimizer.optimizer.param_groups[group]["params"][order]
        return {"param": storage.param(main), **storage.state(main)}
    if hasattr(optimizer, "_get_main_param_and_optimizer_states"):
        named: Mapping[str, torch.Tensor] = optimizer._get_main_param_and_optimizer_states(param)
        return named
    # Up to Megatron-core 0.10 this is part of a longer function.
    group, order = optimizer.model_param_group_index_map[param]
    main = optimizer.optimizer.param_groups[group]["params"][order]
    return {"param": main, **optimizer.optimizer.state[main]}


def places(optimizer: Any) -> list[ParamPiece]:
    """Return the place of each param of the inner optimizer, in the order of its param groups."""
    pieces_by_order = {}
    for number, buffers in enumerate(optimizer.gbuf_ranges):
        (ranges,) = buffers.values()
        for index, bucket in enumerate(ranges):
            for param, param_range in bucket["param_map"].items():
                local = param_range["gbuf_local"]
                order = tuple(optimizer.model_param_group_index_map[param])
                pieces_by_order[order] = ParamPiece(number, index, local.start, local.end)
    return [pieces_by_order[order] for order in sorted(pieces_by_order)]


def tensor_of(tensors: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    """Return the tensor of a part under `key`.

    Raises:
        CheckpointError: the optimizer has no such tensor yet.
    """
    if key not in tensors:
        raise CheckpointError(f"the optimizer has no {key} yet: no update has been made")
    return tensors[key]


# The number of names that are printed.
_TOLD = 3


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if no element is nan or infinite; reads the tensor once and allocates nothing."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    return all(math.isfinite(bound) for bound in torch.stack(torch.aminmax(tensor.detach())).tolist())


def all_finite(value: Any) -> bool:
    """Return True if all tensors of a nested state are finite."""
    return all(map(is_finite, _nested_tensors(value)))


def _nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _nested_tensors(item)


def bad_shards(optimizer: Any, state: Mapping[Any, Any]) -> dict[int, list[str]]:
    """Return the shards of a distributed optimizer's gathered state that are not finite, with the bad keys of
    each.

    Each world tensor is read once; only a tensor that is not finite is examined shard by shard.
    """
    keys_by_shard: dict[int, list[str]] = {}
    for number, buffer in enumerate(optimizer.buffers):
        (world,) = state[number].values()
        for key in KEYS:
            if is_finite(world[key]):
                continue
            for bucket in buckets_of(optimizer, buffer):
                for index in range(shard_of(optimizer)[1]):
                    keys = keys_by_shard.setdefault(index, [])
                    if key not in keys and not is_finite(world[key][slice(*bucket.extent(index))]):
                        keys.append(key)
    return {index: keys for index, keys in sorted(keys_by_shard.items()) if keys}


def not_finite_words(things: list[str]) -> str:
    """Return a sentence about bad things, some by name: "a, b, c and 4 more are not finite"; "" for none."""
    if not things:
        return ""
    omitted = len(things) - _TOLD
    shown = ", ".join(things[:_TOLD]) + (f" and {omitted} more" if omitted > 0 else "")
    return f"{shown} {'is' if len(things) == 1 else 'are'} not finite"
