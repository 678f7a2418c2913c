"""Arms the patches of the framework's own functions that are needed on this device only."""

from __future__ import annotations

import importlib

from adaptor import patching

GROUP = "device:cpu"


def install() -> None:
    # By name: the declarations stand above this package, which must not depend on them to be imported.
    """Arm the patches that the framework needs on a CPU."""
    importlib.import_module("adaptor.patches.cpu_megatron")
    patching.arm(GROUP)
