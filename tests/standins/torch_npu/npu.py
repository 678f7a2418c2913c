"""`torch_npu.npu`, which is `torch.npu`: what `torch.cuda` says of the device."""

from __future__ import annotations

import torch

Event = torch.cuda.Event
Stream = torch.cuda.Stream
current_device = torch.cuda.current_device
current_stream = torch.cuda.current_stream
default_stream = torch.cuda.default_stream
device_count = torch.cuda.device_count
empty_cache = torch.cuda.empty_cache
get_rng_state = torch.cuda.get_rng_state
is_available = torch.cuda.is_available
manual_seed = torch.cuda.manual_seed
max_memory_allocated = torch.cuda.max_memory_allocated
max_memory_reserved = torch.cuda.max_memory_reserved
memory_allocated = torch.cuda.memory_allocated
memory_reserved = torch.cuda.memory_reserved
reset_max_memory_allocated = torch.cuda.reset_max_memory_allocated
set_device = torch.cuda.set_device
set_rng_state = torch.cuda.set_rng_state
stream = torch.cuda.stream
synchronize = torch.cuda.synchronize


def set_compile_mode(jit_compile: bool = False) -> None:
    """Nothing is compiled for a CPU."""
