"""Tensors: factories, moves between devices, and the names of tensor types."""

from __future__ import annotations

from typing import Any

import torch

from adaptor.devices.cpu.placement import on_cpu, rebind

# fmt: off
FACTORIES = (
    "arange", "asarray", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
    "zeros_like",
)
METHOD_FACTORIES = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
ELEMENTS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
# fmt: on


def _made_on_cpu(original: Any, *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    kwargs.pop("pin_memory", None)  # pinning asks for a CUDA driver
    return original(*args, **kwargs)


def _moved_to_cpu(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        args = (on_cpu(args[0]), *args[1:])
    if "device" in kwargs:
        kwargs["device"] = on_cpu(kwargs["device"])
    return original(self, *args, **kwargs)


def _stays(original: Any, self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return self


def _does_nothing(original: Any, *args: Any, **kwargs: Any) -> None:
    return None


def _type_named_as_on_cuda(
    original: Any, self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Optimizers of the framework choose their params by comparing this name with
    "torch.cuda.FloatTensor".
    """
    if dtype is None:
        name = original(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return original(self, dtype, **kwargs)


def install() -> None:
    """Replace the functions that make tensors on a device or move tensors to a device."""
    for name in FACTORIES:
        rebind(torch, name, _made_on_cpu)
    for name in METHOD_FACTORIES:
        rebind(torch.Tensor, name, _made_on_cpu)
    rebind(torch.Tensor, "to", _moved_to_cpu)
    rebind(torch.nn.Module, "to", _moved_to_cpu)
    rebind(torch.Tensor, "cuda", _stays)  # Module.cuda comes down to it
    rebind(torch.Tensor, "pin_memory", _stays)
    rebind(torch.Tensor, "record_stream", _does_nothing)
    rebind(torch.Tensor, "type", _type_named_as_on_cuda)
    for element in ELEMENTS:  # both constructors and operands of isinstance
        setattr(torch.cuda, f"{element}Tensor", getattr(torch, f"{element}Tensor"))
