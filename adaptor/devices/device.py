"""What the engine needs of the device on which a job's tensors lie; imports no torch.

On a device work is queued: the main thread puts it into its stream and goes on. So there are two times at
which something is done, and a dump must not wait for the wrong one. Invariants:

1. The main thread is READY only when its stream has done all that was started before (`catch_up`). So no
   collective is in front of the update, which ends by itself, as on a CPU.
2. What a dump may read is marked in the stream when it has been started (`mark`): the update, the local copy,
   a record. A freeze is answered once the mark of the update has been passed (`wait`). A record whose mark
   has not been passed is not read (`done`), for its stream may stand before a collective that never ends.
3. A dump copies beside that stream (`beside`, `to_host`, `copy`): it waits for its own copies alone, runs
   nothing but copies, and allocates nothing on the device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Device(Protocol):
    """The main thread calls `catch_up` and `mark`, threads of the processor the rest."""

    def catch_up(self) -> None:
        """Return once all that this thread has started is done; raises what the device says of it."""

    def mark(self) -> Any:
        """What this thread has started until now, for `done` and `wait`."""

    def done(self, mark: Any) -> bool:
        """Whether it is done, or has failed, which `unreadable` tells. A mark of None is."""

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Wait until it is done, or has failed; False where it is not after `timeout_s`."""

    def beside(self) -> AbstractContextManager[Any]:
        """While it lasts, what this thread asks of the device does not wait for the main thread's stream."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies on the host, else a copy of it there, of the same dtype."""

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy to the host; `into` is flat, contiguous, and has as many elements."""

    def unreadable(self, release: bool = True) -> str:
        """Why nothing can be read from the device; empty where it can. It answers in some seconds.

        With `release`, to make the device answer, it may end what never ends there (`released`), and a dump
        that is being made with it.
        """

    @property
    def released(self) -> bool:
        """Whether the main thread's stream has gone on with numbers that nobody has reduced."""


class Host:
    """The CPU: what was called has been done."""

    def catch_up(self) -> None:
        """Nothing is queued."""

    def mark(self) -> None:
        return None

    def done(self, mark: Any) -> bool:
        return True

    def wait(self, mark: Any, timeout_s: float) -> bool:
        return True

    def beside(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().cpu()

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        into.copy_(tensor.detach().view(-1))

    def unreadable(self, release: bool = True) -> str:
        return ""

    @property
    def released(self) -> bool:
        return False


HOST = Host()


def within(limit_s: float, act: Callable[[], T]) -> T | None:
    """What `act` returns, in a thread of its own, for a device may never answer; None after `limit_s`."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(act()), name="ttp-device", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else None
