"""Runs a framework written for CUDA and nccl on the CPU and gloo, by stand-ins installed before the
framework's import.

    torchrun --nproc_per_node 4 -m adaptor.devices cpu pretrain_gpt.py ...

trains an unmodified script with these stand-ins alone: nothing else of the adaptor takes part. The parts:

    tensors  factories, moves between devices, names of tensor types, torch.load, data loaders
    cuda     what `torch.cuda` says about the machine; streams and events; the CUDA generator; gloo for nccl
    apex     the optimizer and the layer norm of apex

The stand-ins last as long as the process: the framework's modules keep references to the objects present at
their import.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from adaptor.devices.device import Device
from adaptor.errors import StartError

if TYPE_CHECKING:
    import torch

_FRAMEWORKS = ("megatron", "ascendspeed")
_APEX = ("apex", "apex.optimizers", "apex.normalization", "apex.normalization.fused_layer_norm")
# Names that some versions of the framework use without a definition where Transformer Engine is missing.
_MISSING: dict[str, dict[str, Any]] = {
    "megatron.core.model_parallel_config": {"warnings": warnings},
    "megatron.core.transformer.moe.moe_utils": {"te_general_gemm": None},
    "megatron.core.transformer.multi_token_prediction": {"warnings": warnings},
}
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
    from adaptor.devices.cpu import cuda, tensors

    tensors.install()
    cuda.install_collectives()
    # One device for each process of this node, as a framework expects that counts on one GPU per rank.
    cuda.install(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    install_apex()
    supply_missing_names()
    # By name: the declarations stand above this package.
    importlib.import_module("adaptor.patches.cpu_megatron")
    patching.arm("device:cpu")
    _active = True


def _supply(module: ModuleType) -> None:
    for name, value in _MISSING[module.__name__].items():
        vars(module).setdefault(name, value)


def supply_missing_names() -> None:
    """Supply the missing names, and a name dropped by numpy 2; existing names are kept."""
    import numpy
    import wrapt

    vars(numpy).setdefault("product", numpy.prod)
    for module in _MISSING:
        wrapt.register_post_import_hook(_supply, module)


class ApexFinder:
    """A finder of `sys.meta_path` for the modules of apex without which a framework on CPU takes a broken
    path; `apex.py` has their content.

    - `apex.optimizers`: torch's AdamW counts its steps per parameter, and then the framework's load of
      `torch` checkpoints and its save of `torch_dist` checkpoints break (KeyError 'step'). Apex's FusedAdam
      keeps `step` in `param_groups`.
    - `apex.normalization.fused_layer_norm`: a framework that finds apex uses apex's layer norm (also for
      sequence parallel).

    Everything else of apex keeps raising ImportError. An installed apex is left alone.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return where the stand-in for `name` is, None for other modules; not by `path` or `target`."""
        if name not in _APEX:
            return None
        is_package = name in ("apex", "apex.normalization")
        return importlib.util.spec_from_file_location(
            name, Path(__file__).with_name("apex.py"), submodule_search_locations=[] if is_package else None
        )


def install_apex() -> None:
    """Let `import apex` find the stand-in, where apex is not installed."""
    if importlib.util.find_spec("apex") is None:
        sys.meta_path.append(ApexFinder)
