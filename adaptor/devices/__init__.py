"""The differences between kinds of devices.

Two things: a framework can run on another device than its own (`cpu`): the user chooses the device
(`TTP_DEVICE`, `--ttp-device`), and the device is activated before the framework is imported; no name means
the framework's own device, and nothing is touched. The state of a rank can be read while its device is busy,
or hangs (`device`): the tensors determine the device (`of`). Each kind is an entry point of
`ttp_adaptor.devices`: the adaptor's own (cpu, cuda, npu), and kinds of plug-ins. An import of this package
imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from importlib import metadata
from typing import TYPE_CHECKING, cast

from adaptor import plug_ins
from adaptor.devices.device import HOST, Device, DeviceKind
from adaptor.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch

_OTHERWISE = "or nothing for the accelerator that the framework finds"


def of(tensors: Iterable[torch.Tensor], chosen: str = "") -> Device:
    """Return the device of the first tensor of `tensors` outside of the host; on the main thread.

    Args:
        chosen: TTP_DEVICE, the kind of device where all tensors lie on the host.

    Raises:
        UnsupportedError: no installed kind can read the state of a device of this kind.
    """
    device_found = next(
        (tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None
    )
    if device_found is None:
        import torch

        return _kind(chosen)(torch.device("cpu")) if chosen else HOST
    if device_found.type not in plug_ins.names(plug_ins.DEVICES):
        known_devices = ", ".join(plug_ins.names(plug_ins.DEVICES))
        raise UnsupportedError(
            f"the model lies on {device_found}: its state can be saved from {known_devices} (a plug-in "
            "could add it:"
            f" {plug_ins.DEVICES}); set ENABLE_TTP=False"
        )
    return _kind(device_found.type)(device_found)


def has_accelerator() -> bool:
    """Return whether torch may have an accelerator on this machine; the call does not start the driver of
    CUDA.

    A device added to torch by another package (torch_npu and others) counts as an accelerator.
    """
    import torch

    if importlib.util.find_spec("torch_npu") is not None or metadata.entry_points(group="torch.backends"):
        return True
    asks_nvml = "PYTORCH_NVML_BASED_CUDA_CHECK"
    value_before = os.environ.get(asks_nvml)
    os.environ[asks_nvml] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if value_before is None:
            del os.environ[asks_nvml]
        else:
            os.environ[asks_nvml] = value_before


def require(name: str) -> None:
    """Check that TTP_DEVICE may be `name`; '' is the framework's own device. Raises ConfigError if not."""
    if name:
        _chosen(name)


def activate(name: str) -> Callable[[], None]:
    """Make this process run the framework on the device `name`; '' is the framework's own device.

    Returns:
        A function that ends this process, after a script has ended well, in the best way for the device; it
        may return.

    Raises:
        ConfigError: like `require`.
        StartError: the framework was imported already.
    """
    if not name:
        return lambda: None
    kind = _chosen(name)
    kind.activate()
    return kind.leave


def _chosen(name: str) -> DeviceKind:
    kind = _kind(name)
    if not hasattr(kind, "activate"):
        raise ConfigError(
            f"TTP_DEVICE is {name!r}, on which a framework runs by itself: leave TTP_DEVICE out"
        )
    return kind


def _kind(name: str) -> DeviceKind:
    return cast(DeviceKind, plug_ins.choose(plug_ins.DEVICES, name, "TTP_DEVICE", _OTHERWISE))
