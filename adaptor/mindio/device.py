"""The device in a thread beside the main one, and errors that say that its memory is damaged."""

from __future__ import annotations

import os
import sys
from typing import Any

from adaptor import devices
from adaptor.devices.device import HOST, Device

# What the drivers of Ascend devices say. What such a memory holds must not be saved.
_DAMAGED = ("UCE ERROR", "HBM MULTI BIT ECC")


def current() -> int | None:
    """The index of the device that this thread uses; None where there is none."""
    module = _module()
    if os.environ.get("TTP_DEVICE") == "cpu" or not module.is_available():
        return None
    return int(module.current_device())


def of_this_process() -> Device:
    """On the main thread: what handlers in another thread enter, to use the device beside its stream."""
    index = current()
    if index is None:
        return HOST
    import torch

    kind = "npu" if "torch_npu" in sys.modules else "cuda"
    return devices.of([torch.empty(0, device=torch.device(kind, index))])


def _module() -> Any:
    import torch

    return torch.npu if "torch_npu" in sys.modules else torch.cuda  # type: ignore[attr-defined]


def is_damaged(error: Exception) -> bool:
    """Whether it says that memory of the device is damaged."""
    return any(words in str(error) for words in _DAMAGED)


def give_up(rank: int, why: str) -> None:
    """End this process at once, so that others give what it held."""
    print(f"[ttp] rank {rank}: {why}: its memory is not trusted, others save", file=sys.stderr, flush=True)
    os._exit(1)
