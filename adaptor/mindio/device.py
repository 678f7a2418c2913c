"""The device in a thread beside the main one, and errors that say that its memory is damaged."""

from __future__ import annotations

import sys
from typing import Any

from adaptor import context, devices, output
from adaptor.devices.device import HOST, Device

# Messages of the drivers of Ascend devices about damaged memory, whose content must not be saved.
_DAMAGED = ("UCE ERROR", "HBM MULTI BIT ECC")


def current() -> int | None:
    """The index of the device that this thread uses; None where there is none."""
    module = _module()
    if context.get().settings.device == "cpu" or not module.is_available():
        return None
    return int(module.current_device())


def of_this_process() -> Device:
    """Return a context for handlers in another thread, to use the device beside the main thread's stream.

    Call it on the main thread.
    """
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
    """Tell whether the error says that memory of the device is damaged."""
    return any(phrase in str(error) for phrase in _DAMAGED)


def give_up(rank: int, reason: str) -> None:
    """End this process at once, so that others give what it held."""
    output.tell(f"[ttp] rank {rank}: {reason}: its memory may be damaged, so only other ranks save")
    output.leave(1)
