"""Patches for reading: checkpoints, data loaders, and helper processes that import the script again."""

from __future__ import annotations

import inspect
import multiprocessing.spawn
from typing import Any

import torch
import torch.utils.data

from adaptor.devices.cpu.placement import on_cpu, rebind

_LOADER = inspect.signature(torch.utils.data.DataLoader.__init__)


def _load_to_cpu(original: Any, f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
    location = "cpu" if map_location is None else on_cpu(map_location)
    return original(f, location, *args, **kwargs)


def _loader_with_its_own_generator(original: Any, *args: Any, **kwargs: Any) -> None:
    """Give a loader its own generator: the loader draws a base seed from the CPU's generator, which also
    makes dropout.
    """
    call = _LOADER.bind(*args, **kwargs)
    if call.arguments.get("generator") is None:
        call.arguments["generator"] = torch.Generator().manual_seed(torch.initial_seed())
    call.arguments["pin_memory"] = False
    original(*call.args, **call.kwargs)


def _preparation_without_main(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep a spawned process, which has no stand-ins, from importing the training script again."""
    data = original(*args, **kwargs)
    return {key: value for key, value in data.items() if not key.startswith("init_main")}


def install() -> None:
    """Load to the CPU."""
    rebind((torch, torch.serialization), "load", _load_to_cpu)
    rebind(torch.utils.data.DataLoader, "__init__", _loader_with_its_own_generator)
    rebind(multiprocessing.spawn, "get_preparation_data", _preparation_without_main)
