"""Tensors on the CPU: factories, moves between devices, names of tensor types, and what is read from files.

Every cuda and npu device means the CPU.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing.spawn
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils.data


def on_cpu(device: Any) -> Any:
    """The CPU for whatever names a cuda device (an index, "cuda:1", "npu", a torch.device), else `device`."""
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith(("cuda", "npu")) else device
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    return device


def rebind(owners: Any, name: str, effect: Callable[..., Any]) -> None:
    """Put `effect(original, ...)` in place of `name`, in `owners`: an object or a tuple of objects.

    Plain functions, no proxies: tensor factories and methods are called often, and a method binds as usual.
    """
    owners = owners if isinstance(owners, tuple) else (owners,)
    original = getattr(owners[0], name)

    @functools.wraps(original)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        return effect(original, *args, **kwargs)

    for owner in owners:
        setattr(owner, name, redirected)


def replace(owners: tuple[Any, ...], stand_ins: Mapping[str, Callable[..., Any]]) -> None:
    """Put a function in place of each name of the table, in every owner.

    Each name gets its own function object: torch.compile looks functions up by identity at its import, and
    refuses a function with two names.
    """
    for name, stand_in in stand_ins.items():
        function = _another(stand_in)
        for owner in owners:
            setattr(owner, name, function)


def _another(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


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
    """Name the type as on CUDA: optimizers of the framework choose their params by this name."""
    if dtype is None:
        name = original(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return original(self, dtype, **kwargs)


def install() -> None:
    """Replace the functions that make tensors on a device or move tensors to a device."""
    _install_loading()
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


def _install_loading() -> None:
    rebind((torch, torch.serialization), "load", _load_to_cpu)
    rebind(torch.utils.data.DataLoader, "__init__", _loader_with_its_own_generator)
    rebind(multiprocessing.spawn, "get_preparation_data", _preparation_without_main)
