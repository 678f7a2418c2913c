"""The device in a thread beside the main one, and errors that say that its memory is damaged."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

# What the drivers of Ascend devices say. What such a memory holds must not be saved.
_DAMAGED = ("UCE ERROR", "HBM MULTI BIT ECC")


def current() -> int | None:
    """The index of the device that this thread uses; None where there is none."""
    module = _module()
    if os.environ.get("TTP_DEVICE") == "cpu" or not module.is_available():
        return None
    return int(module.current_device())


def beside() -> Callable[[], contextlib.AbstractContextManager[object]]:
    """On the main thread: what another thread enters to use its device, behind whose stream it cannot wait.

    Where there is no device, it is nothing.
    """
    module, index = _module(), current()
    if index is None:
        return contextlib.nullcontext

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        module.set_device(index)
        with module.stream(module.Stream()):
            yield

    return enter


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
