"""Checks whether the adaptor can be enabled; then arms the patches."""

from __future__ import annotations

import os
import sys
from functools import partial
from types import FunctionType, ModuleType

import wrapt

import adaptor.patches as patches
from adaptor import context, hooks, patching, plug_ins
from adaptor.errors import StartError
from adaptor.protocol.environment import NOT_BY_TTPRUN
from adaptor.worker import runtime
from adaptor.worker.framework_watchdogs import Watchdogs
from adaptor.worker.unprotected import UnprotectedTraining


def arm_patches() -> None:
    """Load and arm the patches of a worker. Raises StartError if called too late, or without ttprun."""
    patches.load("ttp")
    late = patching.imported_unpatched("ttp")
    if late:
        importers = _importers(late[0])
        by = f" (by {', '.join(importers)})" if importers else ""
        raise StartError(
            f"adaptor.enable() was called after {late[0]} was imported{by};"
            " call it before, e.g. as the first line of the script"
        )
    # A child of a worker has this variable, too. It is not refused here: multiprocessing imports the script
    # again in each process that it spawns, for data loaders, too. `runtime.get` refuses one that trains.
    if "TTP_AGENT" not in os.environ:
        conflict = plug_ins.conflict()  # elsewhere ttprun has said it, once for all ranks
        raise StartError(f"{NOT_BY_TTPRUN}; {conflict}" if conflict else NOT_BY_TTPRUN)
    patching.arm("ttp", wait_for_claim=patches.own())
    expect_plug_ins()
    context.part(UnprotectedTraining).arm(runtime.of_this_process)


def claim() -> None:
    """Promise, before process groups are made, to protect the job: patches act, and watchdogs are off."""
    patching.claim("ttp")
    context.part(Watchdogs).switch_off()


def expect_plug_ins() -> None:
    """Claim the job as soon as the script imports the framework of a plug-in.

    Such a script will be protected. The plug-in's call of `adaptor.protect` comes too late: the process
    groups have been made. Packages patched by the adaptor itself do not count, because scripts without the
    plug-in import these packages, too.
    """
    own_roots = {_root(patch.module_name) for unit in patches.own() for patch in unit.patches}
    for unit in patches.of_plug_ins():
        for name in {
            patch.module_name for patch in unit.patches if _root(patch.module_name) not in own_roots
        }:
            wrapt.register_post_import_hook(partial(_framework_is_imported, unit), name)


def _framework_is_imported(unit: patching.Unit, module: ModuleType) -> None:
    if unit.acts:  # not since adaptor.disable()
        claim()


def _root(module_name: str) -> str:
    return module_name.partition(".")[0]


def provide_interface(name: str) -> bool:
    """Provide the interface of another system, for a script that was adapted to that system by hand.

    The framework is then patched by nothing.

    Args:
        name: of the interface; "": the interface that a setting asks for.

    Returns:
        False if no interface is named and no setting asks for an interface.

    Raises:
        ConfigError: the other system itself is installed.
        StartError: ttprun is missing, or the part of the adaptor with the interface.
    """
    parts = [part for part in hooks.of_worker() if (part.interface == name if name else part.is_wanted)]
    if name and not parts:
        raise StartError(f"the interface {name} is no part of this installation; leave out provide_mindio")
    if not parts:
        return False
    if "TTP_AGENT" not in os.environ:
        raise StartError(NOT_BY_TTPRUN)
    for part in parts:
        part.provide()
    context.part(Watchdogs).switch_off()  # the script was adapted to be protected
    context.part(UnprotectedTraining).disarm()
    patching.disarm("ttp")  # ttprun may have armed them, before the script said what it is
    return True


def _importers(module_name: str) -> list[str]:
    """Return the modules outside of the framework that have imported its names, the script first."""
    root = _root(module_name)
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
