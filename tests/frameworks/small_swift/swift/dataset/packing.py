"""Packed samples: rank 0 decides which samples are in a pack, and tells the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from swift.utils import is_dist, is_master


class PackingDataset:
    def __init__(self, template: Any, dataset: Callable[[int], Any], number: int) -> None:
        self.dataset = dataset
        self.packed_idx = list(range(number + 1)) if is_master() else None
        if dist.is_initialized() and is_dist():
            obj_list = [self.packed_idx]
            dist.broadcast_object_list(obj_list)
            self.packed_idx = obj_list[0]

    def __call__(self, number: int) -> Any:
        assert self.packed_idx is not None
        return self.dataset(self.packed_idx[number])
