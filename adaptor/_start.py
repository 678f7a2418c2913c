"""What has to be true when the adaptor is enabled."""

from __future__ import annotations

import os
import sys
from types import FunctionType, ModuleType

import adaptor.patches as patches
from adaptor import mindio, patching
from adaptor.errors import StartError

NOT_BY_TTPRUN = (
    "the adaptor is enabled, but this process was not started by ttprun:"
    " start the job with ttprun instead of torchrun, or set ENABLE_TTP=False"
)


def arm_patches() -> None:
    """Load and arm the patches of a worker. Raises StartError where it is too late, or ttprun is missing."""
    patches.load("ttp")
    late = patching.imported_unpatched("ttp")
    if late:
        importers = _importers(late[0])
        by = f" (by {', '.join(importers)})" if importers else ""
        raise StartError(
            f"adaptor.enable() was called after {late[0]} was imported{by};"
            " call it before, e.g. as the first line of the script"
        )
    if "TTP_AGENT" not in os.environ:
        raise StartError(NOT_BY_TTPRUN)
    patching.arm("ttp")


def provide_mindio() -> None:
    """Let `import mindio_ttp` find the adaptor's, and the framework alone.

    Raises ConfigError where one is installed, StartError where ttprun is missing.
    """
    if "TTP_AGENT" not in os.environ:
        raise StartError(NOT_BY_TTPRUN)
    mindio.provide()
    patching.disarm("ttp")  # ttprun may have armed them, before the script said what it is


def _importers(module_name: str) -> list[str]:
    """The modules outside of the framework that hold something of it, the script first."""
    root = module_name.partition(".")[0]
    # __mp_main__ is multiprocessing's name for __main__.
    names = [
        name
        for name, module in list(sys.modules.items())
        if name != "__mp_main__" and _uses(name, module, root)
    ]
    return sorted(names, key=lambda name: (name != "__main__", name))[:3]


def _uses(name: str, module: ModuleType, root: str) -> bool:
    if name.partition(".")[0] in (root, "adaptor") or not isinstance(module, ModuleType):
        return False
    # Past any __getattribute__: looking must not make a lazy module load, nor a deprecated name warn, as it
    # would if `isinstance` asked an object for its class.
    for value in list(object.__getattribute__(module, "__dict__").values()):
        if issubclass(type(value), (FunctionType, type)):
            origin = value.__module__
        elif issubclass(type(value), ModuleType):
            origin = object.__getattribute__(value, "__dict__").get("__name__")
        else:
            continue
        if isinstance(origin, str) and origin.partition(".")[0] == root:
            return True
    return False
