"""Stand-ins for optimizers, of which the framework's own `sharded_state_dict` takes what a dump saves.

A distributed optimizer gathers nothing in a data-parallel group of one rank, where it has the whole state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from adaptor.checkpoint import shards

# The attributes that a stand-in replaces; a version that lacks one would gather in another way.
REPLACED = (
    "_build_gbuf_range_map",
    "_get_main_param_and_optimizer_states",
    "distributed_optimizer_instance_id",
    "gbuf_ranges",
    "get_parameter_state_dp_zero",
)

# A data-parallel group of the writer alone.
_ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def plain_stand_in(optimizer: Any, live: Any, plain: Any) -> Any:
    """Return a stand-in for an optimizer without shards: it saves `plain`, under the params of `live`."""
    stand_in = copy.copy(optimizer)
    stand_in.state_dict = lambda *_, **__: plain
    stand_in.get_parameters = live.get_parameters
    return stand_in


def gathered_stand_in(optimizer: Any, plain: Any, gathered: Mapping[Any, Any], stored: bool) -> Any:
    """Return a stand-in for a distributed optimizer that has the state of all its shards.

    Its buffers are those of `gathered`, which has no padding at the end of buckets.

    Args:
        plain: what it saves besides the shards.
        gathered: the state of its shards, as `shard_exchange.gather` returns it.
        stored: False: another group saves all of it, as the first optimizer instance saves it for the second.
    """
    stand_in = copy.copy(optimizer)
    stand_in.buffers = [_without_padding(optimizer, buffer) for buffer in optimizer.buffers]
    stand_in.gbuf_ranges = [stand_in._build_gbuf_range_map(buffer) for buffer in stand_in.buffers]
    stand_in.data_parallel_group = stand_in.data_parallel_group_gloo = _ALONE
    stand_in.distributed_optimizer_instance_id = 0 if stored else 1
    stand_in.state_dict = lambda *_, **__: dict(plain)
    stand_in.get_parameter_state_dp_zero = lambda *_, **__: gathered
    whole_state = {
        param: {key: tensor[start:end] for key, tensor in tensors.items() if key in shards.KEYS}
        for number, buffer in enumerate(stand_in.buffers)
        for tensors in gathered[number].values()
        for param, (start, end, _) in buffer.param_index_map.items()
    }
    stand_in._get_main_param_and_optimizer_states = lambda param: dict(whole_state[param])
    return stand_in


def _without_padding(optimizer: Any, buffer: Any) -> SimpleNamespace:
    """Return what the framework reads of a buffer when it saves, with places as in the gathered state.

    Places in a live buffer count the padding at the end of buckets, which the gathered state does not have:
    Megatron-core 0.15 and 0.16 save params behind such padding from a wrong place (fully_reshardable).
    """
    buckets = shards.buckets_of(optimizer, buffer)
    return SimpleNamespace(
        param_dtype=buffer.param_dtype,
        grad_dtype=buffer.grad_dtype,
        numel_unpadded=buffer.numel_unpadded,
        data_parallel_group=_ALONE,
        num_optimizer_shards=1,
        buckets=[
            SimpleNamespace(
                offset=bucket.world,
                numel_unpadded=bucket.unpadded,
                grad_data=torch.empty(bucket.unpadded, device="meta"),
            )
            for bucket in buckets
        ],
        param_index_map={
            param: (start - shift, end - shift, number)
            for param, (start, end, number) in buffer.param_index_map.items()
            for shift in (buckets[number].offset - buckets[number].world,)
        },
    )


def state_without_memory(optimizer: Any) -> dict[Any, Any]:
    """Return a gathered state of this optimizer whose tensors have no memory, to try what saves it."""
    gathered: dict[Any, Any] = {"buckets_coalesced": True}
    for number, buffer in enumerate(optimizer.buffers):
        tensors = {key: torch.empty(buffer.numel_unpadded, device="meta") for key in shards.KEYS}
        gathered[number] = {(buffer.param_dtype, buffer.grad_dtype): tensors}
    return gathered
