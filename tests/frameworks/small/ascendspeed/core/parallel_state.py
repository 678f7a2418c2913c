"""Groups of processes; there is no tensor or pipeline parallelism here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

_DATA_PARALLEL_GROUP: Any = None
_DATA_PARALLEL_GROUP_GLOO: Any = None
_DATA_PARALLEL_GLOBAL_RANKS: Sequence[int] = ()


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
) -> None:
    global _DATA_PARALLEL_GROUP, _DATA_PARALLEL_GROUP_GLOO, _DATA_PARALLEL_GLOBAL_RANKS
    _DATA_PARALLEL_GLOBAL_RANKS = range(dist.get_world_size())
    _DATA_PARALLEL_GROUP = dist.new_group(_DATA_PARALLEL_GLOBAL_RANKS)
    _DATA_PARALLEL_GROUP_GLOO = dist.new_group(_DATA_PARALLEL_GLOBAL_RANKS, backend="gloo")


def get_data_parallel_group() -> Any:
    return _DATA_PARALLEL_GROUP


def get_data_parallel_world_size() -> int:
    return dist.get_world_size(_DATA_PARALLEL_GROUP)


def get_data_parallel_rank() -> int:
    return dist.get_rank(_DATA_PARALLEL_GROUP)
