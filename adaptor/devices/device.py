"""The interface to the device of a job's tensors; imports no torch.

On a device work is queued: the main thread queues work in its stream and goes on. Work therefore has two
times of completion, and a dump must not wait for the wrong time. Invariants:

1. The main thread is READY only when its stream has done all earlier work (`catch_up`). So no collective is
   queued in front of the update, and the update ends by itself, as on a CPU.
2. State readable by a dump is marked in the stream when its work has been started (`mark`): the update, the
   local copy, a record. A freeze is answered once the mark of the update has been passed (`wait`). A record
   after a pending mark is not read (`done`), because its stream may wait for a collective that never ends.
3. A dump copies in a stream of its own (`beside`, `to_host`, `copy`): the stream waits for its own copies
   alone, runs nothing but copies, and allocates nothing on the device.
4. Collectives that never end are ended through the argument of `begin`, and in no other way. The main thread
   may then compute with unreduced numbers, but no step of the main thread counts. In an online recovery the
   collectives are ended once the door turns the main thread away (`end_collectives`); the main thread puts
   its state back when the device has done all queued work (`come_to_rest`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Device:
    """A device; the methods here are those of the CPU, on which called work has been done.

    The main thread calls `begin`, `catch_up`, `mark` and `come_to_rest`; the processor the rest.
    """

    def begin(self, end: Callable[[Callable[[], None]], None]) -> None:
        """Training begins, or begins again after an incident.

        Args:
            end: ends all work on the device for which the main thread may wait. `end` calls its argument, or
                does nothing where nothing may be ended now; one call at a time. After the call no step of the
                main thread counts.
        """

    def catch_up(self) -> None:
        """Return once all work started by this thread is done; raise the device's error."""

    def mark(self) -> Any:
        """Return a mark after all work started by this thread, for `done` and `wait`."""
        return None

    def done(self, mark: Any) -> bool:
        """Tell whether the work before `mark` is done, or has failed (see `unreadable`); True for None."""
        return True

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Wait until the work before `mark` is done or has failed; False if neither after `timeout_s`."""
        return True

    def beside(self) -> AbstractContextManager[Any]:
        """In the block, this thread's work on the device does not wait for the main thread's stream."""
        return nullcontext()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if on the host, else a copy on the host, of the same dtype."""
        return tensor.detach().cpu()

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy to the host; `into` is flat, contiguous, and has as many elements."""
        into.copy_(tensor.detach().view(-1))

    def unreadable(self, release: bool = True) -> str:
        """Return why nothing can be read from the device, or an empty text if the device can be read; takes
        some seconds.

        The call may end work that never ends on the device (`begin`): always where a dump goes on beside the
        work, else with `release`, and a running dump ends with the work.
        """
        return ""

    def end_collectives(self) -> None:
        """End collectives that wait on the device for a lost rank, if any; takes some seconds at most.

        For a main thread that the door turns away: its later results belong to no step.
        """

    def come_to_rest(self) -> None:
        """Return once all work started by this process on the device is done; on the main thread.

        Raises:
            RuntimeError: the device says so.
        """


class DeviceKind(Protocol):
    """A kind of device, named by an entry point of `ttp_adaptor.devices`: a class of `Device`.

    The name of the entry point is torch's name of the kind (`torch.device.type`), if torch has a name. A kind
    for TTP_DEVICE also has the static methods `activate` and `leave`.
    """

    def __call__(self, device: torch.device) -> Device:
        """Make the `Device` of a rank whose tensors lie on `device`; on the rank's main thread."""

    def activate(self) -> None:
        """Make this process run the framework on this device; called before the framework is imported."""

    def leave(self) -> None:
        """End this process after its script has ended well, or return for an ordinary end."""


HOST = Device()
