"""The scripts in benchmarks/ fit the measured code. Their figures are not tested."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import operator
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import warm

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[a-z]*.py"))


def _run(*command: str) -> str:
    process = warm.run([sys.executable, *command], cwd=BENCHMARKS.parent, code=0)
    return process.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_help_of_a_script(script: str) -> None:
    assert "usage" in _run(f"benchmarks/{script}", "--help")


def _names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Return what a script takes from modules of ours: (module, name); by an import or as an attribute."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in ("adaptor", "tests"):
            for alias in node.names:
                yield str(node.module), alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr
    # What is wrapped: a module and a function of it, as texts beside each other.
    for node in ast.walk(tree):
        elements = (
            node.elts if isinstance(node, ast.Tuple) else node.args if isinstance(node, ast.Call) else []
        )
        texts = [word.value if isinstance(word, ast.Constant) else None for word in elements]
        for module, name in itertools.pairwise(texts):
            if isinstance(module, str) and module.startswith("adaptor.") and isinstance(name, str):
                yield module, name


def _is_there(module: str, name: str) -> bool:
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError:  # a class or an object of the module, whose attributes are its own
        return True
    try:
        operator.attrgetter(name)(imported)
    except AttributeError:
        if not hasattr(imported, "__path__"):
            return False
    else:
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_names_from_the_project_exist(path: Path) -> None:
    """A name used only at the end of a campaign would be missed hours later."""
    missing = [names for names in _names(ast.parse(path.read_text())) if not _is_there(*names)]
    assert missing == []


def test_board_and_door_are_measured(tmp_path: Path) -> None:
    assert "door" in _run("benchmarks/board_door.py", "--batches", "4")
