"""Runs a framework written for CUDA and nccl on the CPU and gloo, by stand-ins installed before the
framework's import.

    torchrun --nproc_per_node 4 -m adaptor.devices cpu pretrain_gpt.py ...

trains an unmodified script with these stand-ins alone: nothing else of the adaptor takes part. The parts:

    tensors        factories, moves between devices, names of tensor types
    streams        streams and events
    cuda           what `torch.cuda` says about the machine
    generators     the CUDA generator is the CPU generator
    collectives    gloo for nccl
    loading        torch.load, DataLoader, spawned helpers
    apex_finder    optimizer and layer norm of apex
    missing_names  names that the framework forgot to define
    leaving        the end of the process
    framework      patches of the framework's own functions (adaptor.patches.cpu_megatron)

The stand-ins last as long as the process: the framework's modules keep references to the objects present at
their import.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from adaptor.devices.device import Host
from adaptor.errors import StartError

if TYPE_CHECKING:
    import torch

_FRAMEWORKS = ("megatron", "ascendspeed")
_active = False


class Cpu(Host):
    """The `DeviceKind` of a CPU on which a framework for CUDA runs."""

    def __init__(self, device: torch.device) -> None:
        """The CPU is a single device."""

    @staticmethod
    def activate() -> None:
        activate()

    @staticmethod
    def leave() -> None:
        from adaptor.devices.cpu import leaving

        leaving.leave()


def activate() -> None:
    """Install every stand-in, once. Raises StartError when the framework was imported already."""
    global _active
    if _active:
        return
    early = [name for name in _FRAMEWORKS if name in sys.modules]
    if early:
        raise StartError(f"{early[0]} was imported before the device cpu was activated: activate it first")
    from adaptor.devices.cpu import (
        apex_finder,
        collectives,
        cuda,
        framework,
        generators,
        loading,
        missing_names,
        streams,
        tensors,
    )

    # One device for each process of this node, as a framework expects that counts on one GPU per rank.
    device_count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for part in (tensors, streams, collectives, loading, apex_finder, missing_names, framework):
        part.install()
    generators.install(device_count)
    cuda.install(device_count)
    _active = True
