"""Runs a framework written for CUDA and nccl on the CPU and gloo, by stand-ins installed before the
framework's import.

    torchrun --nproc_per_node 4 -m adaptor.devices cpu pretrain_gpt.py ...

trains an unmodified script with these stand-ins alone: nothing else of the adaptor takes part. The parts:

    tensors        factories, moves between devices, names of tensor types, torch.load, data loaders
    cuda           what `torch.cuda` says about the machine; streams and events; the CUDA generator
    collectives    gloo for nccl
    missing_names  names that the framework forgot to define; optimizer and layer norm of apex (`apex`)

The stand-ins last as long as the process: the framework's modules keep references to the objects present at
their import.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from typing import TYPE_CHECKING, NoReturn

from adaptor.devices.device import Device
from adaptor.errors import StartError

if TYPE_CHECKING:
    import torch

_FRAMEWORKS = ("megatron", "ascendspeed")
_active = False


class Cpu(Device):
    """The `DeviceKind` of a CPU on which a framework for CUDA runs."""

    def __init__(self, device: torch.device) -> None:
        """The CPU is a single device."""

    @staticmethod
    def activate() -> None:
        activate()

    @staticmethod
    def leave() -> NoReturn:
        """End the process with code 0, without taking the interpreter down.

        A gloo thread holds the tensors of the last collective until the thread's next run. If the interpreter
        is shutting down by then, the release of the tensors aborts the process: a script without an error
        would fail, once in some hundred runs on a busy machine (torch 2.13, in scripts that do not destroy
        their process groups). The normal steps of an exit come first, in Python's own order.
        """
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):  # whoever reads it is gone: the training is done
                continue
        os._exit(0)


def activate() -> None:
    """Install every stand-in, once. Raises StartError when the framework was imported already."""
    global _active
    if _active:
        return
    early = [name for name in _FRAMEWORKS if name in sys.modules]
    if early:
        raise StartError(f"{early[0]} was imported before the device cpu was activated: activate it first")
    from adaptor import patching
    from adaptor.devices.cpu import collectives, cuda, missing_names, tensors

    tensors.install()
    collectives.install()
    # One device for each process of this node, as a framework expects that counts on one GPU per rank.
    cuda.install(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    missing_names.install_apex()
    missing_names.install()
    # By name: the declarations stand above this package.
    importlib.import_module("adaptor.patches.cpu_megatron")
    patching.arm("device:cpu")
    _active = True
