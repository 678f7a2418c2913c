"""Frameworks that are not at hand, as their recorded signatures: names and parameters, no code.

`tests/frameworks/signatures.py` writes the files of tests/patches/signatures.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

SIGNATURES = Path(__file__).with_name("signatures")


def read(name: str) -> dict[str, str]:
    """Return a framework's signatures, "(a, b=, ...)" by "module:name"."""
    signatures: dict[str, str] = json.loads((SIGNATURES / f"{name}.json").read_text())["found"]
    return signatures


def write(folder: Path, recorded: dict[str, str]) -> None:
    """Make packages below `folder` whose functions have these signatures, and do nothing."""
    bodies: dict[str, list[str]] = defaultdict(list)
    for target in sorted(recorded):
        module, _, qualname = target.partition(":")
        owner, _, name = qualname.rpartition(".")
        parameters = recorded[target][1:-1].replace("=", "=None")
        if owner and f"class {owner}:" not in bodies[module]:
            bodies[module].append(f"class {owner}:")
        first = ", ".join(filter(None, ("self" if owner else "", parameters)))
        bodies[module].append(f"{'    ' if owner else ''}def {name}({first}): ...")
    for module, lines in bodies.items():
        parts = module.split(".")
        for depth in range(1, len(parts)):
            package = folder.joinpath(*parts[:depth])
            package.mkdir(exist_ok=True)
            (package / "__init__.py").touch()
        is_package = any(body.startswith(f"{module}.") for body in bodies)
        path = folder.joinpath(*parts)
        if is_package:
            path.mkdir(exist_ok=True)
        (path / "__init__.py" if is_package else path.with_suffix(".py")).write_text("\n".join(lines) + "\n")
