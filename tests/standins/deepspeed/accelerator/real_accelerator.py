"""The only accelerator: named NPU, with tensors on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Accelerator:
    """Of DeepSpeed's abstract interface what ModelLink asks for; `torch.cuda` answers."""

    ByteTensor = torch.ByteTensor
    FloatTensor = torch.FloatTensor
    HalfTensor = torch.HalfTensor
    IntTensor = torch.IntTensor
    LongTensor = torch.LongTensor
    current_device = staticmethod(torch.cuda.current_device)
    device = staticmethod(torch.cuda.device)
    device_count = staticmethod(torch.cuda.device_count)
    get_rng_state = staticmethod(torch.cuda.get_rng_state)
    is_available = staticmethod(torch.cuda.is_available)
    manual_seed = staticmethod(torch.cuda.manual_seed)
    max_memory_allocated = staticmethod(torch.cuda.max_memory_allocated)
    max_memory_reserved = staticmethod(torch.cuda.max_memory_reserved)
    memory_allocated = staticmethod(torch.cuda.memory_allocated)
    memory_reserved = staticmethod(torch.cuda.memory_reserved)
    set_device = staticmethod(torch.cuda.set_device)
    set_rng_state = staticmethod(torch.cuda.set_rng_state)
    synchronize = staticmethod(torch.cuda.synchronize)

    def device_name(self, device_index: int | None = None) -> str:
        """Part of the names of tensor types."""
        return "npu"

    def current_device_name(self) -> str:
        """Where tensors are made."""
        return "cpu"

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        callback()


_accelerator = Accelerator()


def get_accelerator() -> Accelerator:
    return _accelerator
