"""Records the signatures of patched functions: `python -m tests.frameworks.signatures NAME TREE/script.py`.

The output belongs into tests/patches/signatures; the framework's own output precedes it. `found` has the
names and parameters of the patched functions, as the script's framework defines them; `replaced` those of the
functions by which the framework's own patch manager replaces them; `lacks` the modules that are missing in
this version. Nothing is trained. The environment is that of `by_hand`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Mapping
from typing import Any, cast

from adaptor import _script, devices, patches, patching
from adaptor.patching._target import is_gone, parameters_of, render

MANAGERS = (
    ("modellink.patchs.patch_utils", "PatchManager", "_patch_info_collection"),
    ("mindspeed.patch_utils", "MindSpeedPatchesManager", "patches_info"),
)


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("usage: signatures.py NAME TREE/script.py [arguments]")
    name = sys.argv[1]
    _script.take_over(sys.argv[2:])
    devices.activate("cpu")
    patches.load("ttp")
    patching.arm("ttp", raises=False)
    for module in patching.target_modules("ttp"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
    signatures = {
        outcome.target: outcome.found
        for outcome in patching.outcomes("ttp")
        if outcome.found and outcome.status is not patching.PatchState.MISSING
    }
    came_with = {patch.optional for unit in patching.units("ttp") for patch in unit.patches}
    lacks = sorted(module for module in came_with if isinstance(module, str) and is_gone(module))
    record = {
        "name": name,
        "found": signatures,
        "replaced": _replaced(signatures),
        **({"lacks": lacks} if lacks else {}),
    }
    print(json.dumps(record, indent=2))


def _replaced(signatures: dict[str, str]) -> dict[str, str]:
    functions = {
        target: info.patch_func
        for target in signatures
        if (info := _manager().get(target.replace(":", "."))) and info.patch_func is not None
    }
    return {
        target: render(parameters_of(function, "." in target.partition(":")[2]))
        for target, function in functions.items()
    }


def _manager() -> Mapping[str, Any]:
    """Return the entries of the framework's own patch manager, by the patched function."""
    for module, manager, entries in MANAGERS:
        with contextlib.suppress(ModuleNotFoundError):
            return cast(
                Mapping[str, Any], getattr(getattr(importlib.import_module(module), manager), entries)
            )
    return {}


if __name__ == "__main__":
    main()
