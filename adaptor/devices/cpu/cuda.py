"""The rest of `torch.cuda`: information about the machine, and calls without an effect on a CPU."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import torch

from adaptor.devices.cpu.placement import replace

# Ampere: bf16 is supported, and nothing newer is asked of the device.
CAPABILITY = (8, 0)
# fmt: off
NOTHING_TO_DO = (
    "_lazy_init", "empty_cache", "init", "ipc_collect", "reset_max_memory_allocated",
    "reset_max_memory_cached", "reset_peak_memory_stats", "set_device", "set_per_process_memory_fraction",
    "synchronize",
)
MEMORY_FIGURES = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
# fmt: on


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def install(device_count: int) -> None:
    """Make torch.cuda report `device_count` devices."""
    properties = types.SimpleNamespace(
        name="cpu",
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=1,
        total_memory=0,
        gcnArchName="",
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "device_count": device_count,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "memory_stats": collections.defaultdict(int),
        "mem_get_info": (0, 0),
    }
    answers |= dict.fromkeys(NOTHING_TO_DO) | dict.fromkeys(MEMORY_FIGURES, 0)
    replace((torch.cuda,), {name: _always(answer) for name, answer in answers.items()})
    replace((torch.cuda,), {"_lazy_call": lambda call, **kwargs: call()})
    replace((torch.cuda.nvtx,), {"range_push": _always(0), "range_pop": _always(0)})
