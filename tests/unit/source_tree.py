"""The shipped modules, for tests that read source code."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {"adaptor": "adaptor", "adaptor.patches": "patches", "adaptor.launchers": "launchers"}


def modules() -> dict[str, Path]:
    """Return the files of all modules by their names."""
    files = {}
    for package, folder in SOURCES.items():
        for path in (ROOT / folder).rglob("*.py"):
            # Links to the other two stand among the folders of the first.
            if package == "adaptor" and path.relative_to(ROOT / folder).parts[0] in ("patches", "launchers"):
                continue
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            files[name] = path
    return files


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Return the tree of a file, which no test may change."""
    return ast.parse(path.read_text())


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree of a file, the module first."""
    return tuple(ast.walk(parsed(path)))
