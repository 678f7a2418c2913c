"""The patches by group, a file for each module of a framework; adapters; and installed plug-ins."""

from __future__ import annotations

import importlib
import sys

from adaptor import plug_ins
from adaptor.patching import Unit, units

if __name__ != "adaptor.patches":
    raise ImportError(
        f"the directory patches/ is the package adaptor.patches, it was imported as {__name__!r}"
    )

FILES: dict[str, tuple[str, ...]] = {
    "ttp": (
        "megatron_core",
        "megatron_training",
        "megatron_checkpointing",
        "ascendspeed_core",
        "ascendspeed_training",
        "mindspeed",
        # Frameworks with loops of their own: declared as those of plug-ins are.
        "adaptor.adapters.megatron_bridge",
        "adaptor.adapters.ms_swift",
        "adaptor.adapters.mcore_adapter",
        "adaptor.adapters.copied_loops",
    ),
    "worker": ("torch_worker",),
    "online": ("torch_groups", "megatron_online", "mindspeed_online", "ascendspeed_online"),
    "report": ("report_arguments",),
}
# Of optional parts: left out where they are not installed.
OPTIONAL = ("mindspeed", "ascendspeed_", "adaptor.adapters.")


def load(group: str) -> None:
    """Import the files of a group, which declare its units; no framework.

    Raises:
        KeyError: the group is unknown.
        StartError: a plug-in cannot be loaded; without the plug-in its framework would be trained
            unprotected.
    """
    for name in FILES[group]:
        module = name if "." in name else f"{__name__}.{name}"
        if not name.startswith(OPTIONAL) or plug_ins.is_installed(module):
            importlib.import_module(module)
    if group == "ttp":
        for plug_in in plug_ins.declared(plug_ins.PATCHES):
            plug_ins.load(plug_in)


def of_plug_ins() -> tuple[Unit, ...]:
    """Return the units of group `ttp` declared by plug-ins and adapters."""
    return tuple(unit for unit in units("ttp") if not unit.declared_in.startswith(f"{__name__}."))


def of_absent_frameworks() -> frozenset[str]:
    """Return the modules that adapters patch and that are not imported: a job of another framework needs none
    of the modules, and their dependencies may be missing.
    """
    adapters = [unit for unit in units("ttp") if unit.declared_in.startswith("adaptor.adapters.")]
    modules = [{patch.module_name for patch in unit.patches} for unit in adapters]
    return frozenset().union(*(names for names in modules if names.isdisjoint(sys.modules)))


def own() -> tuple[Unit, ...]:
    """Return the units of group `ttp` declared by the adaptor itself; these units wait for a claim."""
    others = of_plug_ins()
    return tuple(unit for unit in units("ttp") if unit not in others)
