"""ModelLink's distributed optimizer cut in two, with the engine's view of the optimizer. Imported with the
framework.

With `split` replicas the data-parallel group has two halves, and each half holds the whole optimizer state in
twice as large shards. The methods of the framework's own optimizer then work on the half instead of the
group: gather parameters, sum the gradient norm, read and write the parameter state.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from adaptor import context
from adaptor.context import Context
from adaptor.replica.choice import ReplicaChoice

HALVES = 2


@dataclass(frozen=True)
class Half:
    """The half of the data-parallel group with this rank, and the rank's twin in the other half.

    Attributes:
        ranks: of the half; their order is that of the shards
        group: of these, over which the framework reduces; `gloo` for tensors on the host
        twins: the group of the ranks that have this shard, one of each half
    """

    ranks: tuple[int, ...]
    group: dist.ProcessGroup
    gloo: dist.ProcessGroup
    twins: dist.ProcessGroup
    first: bool


class Halves:
    """The half of this process, a part of its context; None while the data-parallel group is whole."""

    def __init__(self, context: Context) -> None:
        self.own: Half | None = None


def half() -> Half | None:
    """Return this rank's half; None where the data-parallel group is whole."""
    return context.part(Halves).own


def own_half() -> Half:
    """Return this rank's half, where the data-parallel group is cut."""
    half_of_rank = half()
    assert half_of_rank is not None
    return half_of_rank


def cut(tensor: int, pipeline: int) -> None:
    """Cut the data-parallel groups where `split` replicas are to be made; on every rank at the same time.

    Args:
        tensor, pipeline: the sizes of the model-parallel groups, which the framework has made.
    """
    from ascendspeed import get_args

    world = dist.get_world_size()
    size = world // (tensor * pipeline)
    if not get_args().use_distributed_optimizer or context.part(ReplicaChoice).instances(size, 1) != HALVES:
        return
    for stage in range(pipeline):
        for first in range(tensor):
            begin = stage * (world // pipeline) + first
            cut_one(tuple(range(begin, begin + size * tensor, tensor)))


def cut_one(ranks: tuple[int, ...]) -> None:
    """Cut a data-parallel group; called on every rank at the same time."""
    halves = context.part(Halves)
    halves.own = _cut(ranks) or halves.own


def _cut(ranks: tuple[int, ...]) -> Half | None:
    """Cut a data-parallel group into halves; return this rank's half, None outside of the group."""
    middle = len(ranks) // HALVES
    own_groups, twins = None, None
    for pair in zip(ranks[:middle], ranks[middle:], strict=True):
        group = dist.new_group(pair)
        twins = group if dist.get_rank() in pair else twins
    for some in (ranks[:middle], ranks[middle:]):
        groups = dist.new_group(some), dist.new_group(some, backend="gloo")
        own_groups = (some, *groups) if dist.get_rank() in some else own_groups
    return (
        None
        if own_groups is None or twins is None
        else Half(*own_groups, twins, own_groups[0][0] == ranks[0])
    )


@contextlib.contextmanager
def half_as_data_parallel_group() -> Iterator[None]:
    """Put the half in the place of the data-parallel group for calls of the main thread in the block.

    A dump, which may run at the same time, uses none of the groups.
    """
    from ascendspeed.core import parallel_state

    half_of_rank = own_half()
    names = {
        "_DATA_PARALLEL_GROUP": half_of_rank.group,
        "_DATA_PARALLEL_GROUP_GLOO": half_of_rank.gloo,
        "_DATA_PARALLEL_GLOBAL_RANKS": half_of_rank.ranks,
    }
    whole_groups = {name: getattr(parallel_state, name) for name in names}
    vars(parallel_state).update(names)
    try:
        yield
    finally:
        vars(parallel_state).update(whole_groups)


def ranges(optimizer: Any, model: Any, dtype: Any) -> dict[str, Any]:
    """Return the result of `build_model_gbuf_range` for this rank's shard, twice as large as without halves.

    `dtype` is the dtype of the buffer.

    The padded buffer is a multiple of the group's size, so two halves divide the buffer evenly.
    """
    from ascendspeed.optimizer.distrib_optimizer import Range

    half_of_rank = own_half()
    buffer = model._grad_buffers[dtype]
    size = buffer.numel_padded // len(half_of_rank.ranks)
    bounds = [min(number * size, buffer.numel) for number in range(len(half_of_rank.ranks) + 1)]
    every = [Range(*pair) for pair in itertools.pairwise(bounds)]
    own_range = every[half_of_rank.ranks.index(dist.get_rank())]
    return {
        "local": own_range.normalize(),
        "world": own_range,
        "world_all": every,
        "param_map": optimizer.build_model_gbuf_param_range_map(model, dtype, own_range),
        "max_range_size": size,
    }


def halve(optimizer: Any) -> None:
    """Divide the gradients by the number of halves, before each half reduces them.

    No sum is then larger than in the framework itself, so halves cause no additional overflow.
    """
    for model in optimizer.models:
        for buffer in model._grad_buffers.values():
            buffer.data /= HALVES


def add_twins(optimizer: Any) -> None:
    """Add the gradients of the other half to this shard, once each half has reduced its own."""
    half_of_rank = own_half()
    own_place = half_of_rank.ranks.index(dist.get_rank())
    for _, _, _, views in optimizer.get_model_grad_buffer_dp_views():
        dist.all_reduce(views[own_place], group=half_of_rank.twins)


@dataclass(frozen=True, eq=False)
class HalfBuffer:
    """A grad buffer and its single bucket, under the names of Megatron-core's (`_ParamAndGradBuffer`)."""

    grad_data: torch.Tensor
    numel_unpadded: int
    grad_dtype: torch.dtype
    param_dtype: torch.dtype
    param_index_map: dict[Any, tuple[int, int, int]]
    param_data: None = None
    offset: int = 0

    @property
    def buckets(self) -> list[HalfBuffer]:
        """Return the buckets of the buffer: a single bucket."""
        return [self]


def describe(optimizer: Any) -> None:
    """Give a distributed optimizer the attribute names of Megatron-core's."""
    from ascendspeed.core import parallel_state

    half_of_rank = half()
    optimizer.data_parallel_group = (
        half_of_rank.group if half_of_rank else parallel_state.get_data_parallel_group()
    )
    optimizer.buffers = [
        HalfBuffer(
            buffer.data,
            buffer.numel,
            dtype,
            optimizer.params_dtype,
            {
                param: (*buffer_range, 0)
                for param, buffer_range in model._grad_buffer_param_index_map[dtype].items()
            },
        )
        for model in optimizer.models
        for dtype, buffer in model._grad_buffers.items()
    ]
    optimizer.gbuf_ranges = [
        {dtype: [dtype_range]}
        for by_dtype in optimizer.model_gbuf_ranges
        for dtype, dtype_range in by_dtype.items()
    ]
