"""`torch_npu.npu`, which is `torch.npu`: the device functions of `torch.cuda`."""

from __future__ import annotations

from collections import defaultdict

import torch

Event = torch.cuda.Event
Stream = torch.cuda.Stream
_lazy_call = torch.cuda._lazy_call
current_device = torch.cuda.current_device
current_stream = torch.cuda.current_stream
default_generators = torch.cuda.default_generators
default_stream = torch.cuda.default_stream
device = torch.cuda.device
device_count = torch.cuda.device_count
empty_cache = torch.cuda.empty_cache
get_rng_state = torch.cuda.get_rng_state
is_available = torch.cuda.is_available
manual_seed = torch.cuda.manual_seed
manual_seed_all = torch.cuda.manual_seed_all
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


def _is_in_bad_fork() -> bool:
    """A CPU knows no bad fork."""
    return False


def stop_device(device_id: int) -> int:
    """Return 0: the device has stopped. A CPU has no tasks of its own."""
    return 0


def restart_device(device_id: int, rebuild_all_resources: bool = False) -> None:
    """After `stop_device`."""


def init() -> None:
    """A CPU has nothing to start."""


def memory_stats(device: object = None) -> dict[str, int]:
    """Return counts of a memory that nothing is taken from."""
    return defaultdict(int)
