"""ModelLink's distributed optimizer cut in two, and what the engine asks of it. Imported with the framework.

With `split` replicas the data-parallel group has two halves, and each of them holds the whole optimizer state
in twice as large shards. The methods of the framework's own optimizer then do what they do for the half
instead of the group: gather parameters, sum the gradient norm, read and write the parameter state.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from adaptor.replica import choice

HALVES = 2


@dataclass(frozen=True)
class Half:
    """This rank's half of its data-parallel group, and its twin in the other one.

    ranks  of the half; their order is that of the shards
    group  of these, over which the framework reduces; `gloo` for tensors on the host
    twins  the group of the ranks that have this shard, one of each half
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    gloo: dist.ProcessGroup
    twins: dist.ProcessGroup
    first: bool


_half: Half | None = None


def half() -> Half | None:
    """None where the data-parallel group is whole."""
    return _half


def cut(tensor: int, pipeline: int) -> None:
    """Cut the data-parallel groups where `split` replicas are to be made; on every rank at the same time.

    Args:
        tensor, pipeline: the sizes of the model-parallel groups, which the framework has made.
    """
    from ascendspeed import get_args

    world = dist.get_world_size()
    size = world // (tensor * pipeline)
    if not get_args().use_distributed_optimizer or choice.instances(size, 1) != HALVES:
        return
    for stage in range(pipeline):
        for first in range(tensor):
            begin = stage * (world // pipeline) + first
            cut_one(tuple(range(begin, begin + size * tensor, tensor)))


def cut_one(ranks: tuple[int, ...]) -> None:
    """Cut one data-parallel group; on every rank at the same time, whether it is in it or not."""
    global _half
    _half = _cut(ranks) or _half


def _cut(ranks: tuple[int, ...]) -> Half | None:
    """Of one data-parallel group; None where this rank is not in it."""
    middle = len(ranks) // HALVES
    own, twins = None, None
    for pair in zip(ranks[:middle], ranks[middle:], strict=True):
        group = dist.new_group(pair)
        twins = group if dist.get_rank() in pair else twins
    for some in (ranks[:middle], ranks[middle:]):
        groups = dist.new_group(some), dist.new_group(some, backend="gloo")
        own = (some, *groups) if dist.get_rank() in some else own
    return None if own is None or twins is None else Half(*own, twins, own[0][0] == ranks[0])


@contextlib.contextmanager
def in_charge() -> Iterator[None]:
    """The half stands where the data-parallel group does, for what the main thread calls meanwhile.

    A dump, which may run beside it, asks for none of these.
    """
    from ascendspeed.core import parallel_state

    assert _half is not None
    names = {
        "_DATA_PARALLEL_GROUP": _half.group,
        "_DATA_PARALLEL_GROUP_GLOO": _half.gloo,
        "_DATA_PARALLEL_GLOBAL_RANKS": _half.ranks,
    }
    whole = {name: getattr(parallel_state, name) for name in names}
    vars(parallel_state).update(names)
    try:
        yield
    finally:
        vars(parallel_state).update(whole)


def ranges(optimizer: Any, model: Any, dtype: Any) -> dict[str, Any]:
    """What `build_model_gbuf_range` says of this rank's shard: in the buffer with its padding, which is a
    multiple of the group's size, it is twice as large as without halves."""
    from ascendspeed.optimizer.distrib_optimizer import Range

    assert _half is not None
    buffer = model._grad_buffers[dtype]
    size = buffer.numel_padded // len(_half.ranks)
    bounds = [min(number * size, buffer.numel) for number in range(len(_half.ranks) + 1)]
    every = [Range(*pair) for pair in itertools.pairwise(bounds)]
    own = every[_half.ranks.index(dist.get_rank())]
    return {
        "local": own.normalize(),
        "world": own,
        "world_all": every,
        "param_map": optimizer.build_model_gbuf_param_range_map(model, dtype, own),
        "max_range_size": size,
    }


def halve(optimizer: Any) -> None:
    """Before the halves reduce the gradients, each by the number of its own ranks: no sum of two halves is
    larger then than what the framework itself would have."""
    for model in optimizer.models:
        for buffer in model._grad_buffers.values():
            buffer.data /= HALVES


def add_twins(optimizer: Any) -> None:
    """Each half has reduced its gradients to shards: add those of the other half."""
    assert _half is not None
    own = _half.ranks.index(dist.get_rank())
    for _, _, _, views in optimizer.get_model_grad_buffer_dp_views():
        dist.all_reduce(views[own], group=_half.twins)


@dataclass(frozen=True, eq=False)
class Buffer:
    """A grad buffer, and the one bucket in it, under the names of Megatron-core's (`_ParamAndGradBuffer`)."""

    grad_data: torch.Tensor
    numel_unpadded: int
    grad_dtype: torch.dtype
    param_dtype: torch.dtype
    param_index_map: dict[Any, tuple[int, int, int]]
    param_data: None = None
    offset: int = 0

    @property
    def buckets(self) -> list[Buffer]:
        return [self]


def describe(optimizer: Any) -> None:
    """Give a distributed optimizer the names that those of Megatron-core have for the same things."""
    from ascendspeed.core import parallel_state

    optimizer.data_parallel_group = _half.group if _half else parallel_state.get_data_parallel_group()
    optimizer.buffers = [
        Buffer(
            buffer.data,
            buffer.numel,
            dtype,
            optimizer.params_dtype,
            {param: (*where, 0) for param, where in model._grad_buffer_param_index_map[dtype].items()},
        )
        for model in optimizer.models
        for dtype, buffer in model._grad_buffers.items()
    ]
    optimizer.gbuf_ranges = [
        {dtype: [where]} for by_dtype in optimizer.model_gbuf_ranges for dtype, where in by_dtype.items()
    ]
