"""The interface to the device on which a job's tensors lie; imports no torch.

On a device work is queued: the main thread puts it into its stream and goes on. So there are two times at
which something is done, and a dump must not wait for the wrong one. Invariants:

1. The main thread is READY only when its stream has done all that was started before (`catch_up`). So no
   collective is in front of the update, which ends by itself, as on a CPU.
2. What a dump may read is marked in the stream when it has been started (`mark`): the update, the local copy,
   a record. A freeze is answered once the mark of the update has been passed (`wait`). A record whose mark
   has not been passed is not read (`done`), for its stream may stand before a collective that never ends.
3. A dump copies beside that stream (`beside`, `to_host`, `copy`): it waits for its own copies alone, runs
   nothing but copies, and allocates nothing on the device.
4. Collectives that never end are ended through what `begin` was given, and in no other way. The main thread
   may then compute with what nobody has reduced, but no step of it counts. In an online recovery they are
   ended once the door turns the main thread away (`end_collectives`), which puts its state back when the
   device has done all of that (`come_to_rest`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Device(Protocol):
    """The main thread calls `begin`, `catch_up`, `mark` and `come_to_rest`; the processor the rest."""

    def begin(self, end: Callable[[Callable[[], None]], None]) -> None:
        """Training begins, or begins again after an incident.

        Args:
            end: through it all is ended on the device that the main thread may wait for. It calls what it is
                given, or does not, where nothing may be ended now; one at a time. From then on no step of the
                main thread counts, whatever it goes on with.
        """

    def catch_up(self) -> None:
        """Return once all that this thread has started is done; raises what the device says of it."""

    def mark(self) -> Any:
        """Return a mark behind everything that this thread has started until now, for `done` and `wait`."""

    def done(self, mark: Any) -> bool:
        """Tell whether the work before `mark` is done, or has failed (see `unreadable`); True for None."""

    def wait(self, mark: Any, timeout_s: float) -> bool:
        """Wait until the work before `mark` is done or has failed; False if neither after `timeout_s`."""

    def beside(self) -> AbstractContextManager[Any]:
        """While it lasts, what this thread asks of the device does not wait for the main thread's stream."""

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it lies on the host, else a copy of it there, of the same dtype."""

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy to the host; `into` is flat, contiguous, and has as many elements."""

    def unreadable(self, release: bool = True) -> str:
        """Return why nothing can be read from the device, or an empty text if it can; takes some seconds.

        To make the device answer, it may end what never ends there (`begin`): always where a dump goes on
        beside that, else with `release`, and a dump that is being made ends with it.
        """

    def end_collectives(self) -> None:
        """End collectives that wait on the device for a rank that is gone, if there are any; takes some
        seconds at most.

        For a main thread that the door turns away: what it computes from them belongs to no step.
        """

    def come_to_rest(self) -> None:
        """Return once all is done that this process has started on the device; on the main thread.

        Raises:
            RuntimeError: the device says so.
        """


class DeviceKind(Protocol):
    """A kind of device, as an entry point of `ttp_adaptor.devices` names it: a class of `Device`.

    The name of the entry point is torch's name of the kind (`torch.device.type`), where it has one. A kind
    that TTP_DEVICE may name also has the static methods `activate` and `leave`.
    """

    def __call__(self, device: torch.device) -> Device:
        """Make the `Device` of a rank whose tensors lie on `device`; on its main thread."""

    def activate(self) -> None:
        """Make this process run the framework on this device; called before the framework is imported."""

    def leave(self) -> None:
        """End this process, whose script has ended well, or return, and it ends as any other."""


class Host:
    """The CPU: what was called has been done."""

    def begin(self, end: Callable[[Callable[[], None]], None]) -> None:
        """Do nothing: nothing on the host has to be ended before its memory can be read."""

    def catch_up(self) -> None:
        """Do nothing: on the host no work is queued."""

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

    def end_collectives(self) -> None:
        """Do nothing: connections are shut instead (`abort_gloo`)."""

    def come_to_rest(self) -> None:
        """Do nothing: on the host no work is queued."""


HOST = Host()
