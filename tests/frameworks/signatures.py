"""Records the signatures that the patches meet: `python -m tests.frameworks.signatures NAME TREE/script.py`.

Prints what tests/patches/signatures holds, below what the framework has to say: names and parameters of the
functions that are patched, as the framework of the script defines them (`found`), and of what its own patch
manager replaces them by (`replaced`). Nothing is trained; the environment is that of `by_hand`.
"""

from __future__ import annotations

import importlib
import json
import sys

from adaptor import _script, devices, patches, patching
from adaptor.patching._signature import parameters_of, render


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
    found = {
        outcome.target: outcome.found
        for outcome in patching.outcomes("ttp")
        if outcome.found and outcome.status is not patching.Status.MISSING
    }
    print(json.dumps({"name": name, "found": found, "replaced": _replaced(found)}, indent=2))


def _replaced(found: dict[str, str]) -> dict[str, str]:
    try:
        from mindspeed.patch_utils import MindSpeedPatchesManager
    except ModuleNotFoundError:
        return {}
    functions = {
        target: info.patch_func
        for target in found
        if (info := MindSpeedPatchesManager.patches_info.get(target.replace(":", ".")))
        and info.patch_func is not None
    }
    return {
        target: render(parameters_of(function, "." in target.partition(":")[2]))
        for target, function in functions.items()
    }


if __name__ == "__main__":
    main()
