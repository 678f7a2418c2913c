"""What differs between kinds of devices.

Two things: that a framework runs on a CPU at all (`cpu`), which the user chooses (`TTP_DEVICE`,
`--ttp-device`) and which is activated before the framework is imported; no name means the framework's own
device, and nothing is touched. And how the state of a rank is read while its device is busy, or hangs
(`device`): which device that is, its tensors tell (`of`). Importing this package imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from adaptor.devices.device import HOST, Device
from adaptor.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch

NAMES = ("cpu",)


def of(tensors: Iterable[torch.Tensor]) -> Device:
    """The device on which the first of `tensors` lies that does not lie on the host; on the main thread.

    Raises LayoutError for a kind from which no state could be read while it is busy.
    """
    found = next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)
    if found is None:
        return HOST
    if found.type == "cuda":
        from adaptor.devices.cuda import Cuda

        return Cuda(found)
    if found.type == "npu":
        from adaptor.devices.npu import Npu

        return Npu(found)
    raise LayoutError(
        f"the model lies on {found}: its state can be saved from cpu, cuda and npu; set ENABLE_TTP=False"
    )


def activate(name: str) -> None:
    """Make this process run the framework on the device `name`, '' for the framework's own.

    Raises ConfigError for a name that is not known, StartError when the framework was imported already.
    """
    if not name:
        return
    if name not in NAMES:
        raise ConfigError(
            f"TTP_DEVICE is {name!r}: use one of {', '.join(NAMES)}, or nothing for the framework's own"
        )
    from adaptor.devices import cpu

    cpu.activate()


def leave(name: str) -> None:
    """The script has ended well on the device `name`: end this process as is best there; it may return."""
    if name == "cpu":
        from adaptor.devices.cpu import leaving

        leaving.leave()
