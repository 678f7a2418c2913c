"""What a script changes before it imports a module is found by what that module has imported by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = """
class Base: pass
class Kept(Base): pass
def function(): pass
def other(): pass
"""
THERE = """
import functools
from here import Base, Kept, function
class Own(Base): pass
def decorated(wrapped):
    @functools.wraps(wrapped)
    def around(): wrapped()
    return around
@decorated
def own(): pass
"""
# As processes of a job: one that changes something between its imports, and one that only imports.
COMPARE = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
from adaptor.worker import imported_names
change, imports = sys.argv[2], sys.argv[3:]
for name in imports[:1]:
    importlib.import_module(name)
exec(change)
for name in imports[1:]:
    importlib.import_module(name)
codes = imported_names.of_modules(imports)
print(json.dumps({name: code.hex() for name, code in codes.items()}))
told = {name: bytes.fromhex(code) for name, code in json.loads(sys.stdin.read() or "{}").items()}
print(imported_names.first_that_differs(told, imports))
"""


def compared(folder: Path, change: str) -> str:
    """Return what differs in a process that has only imported, from one that has changed something before."""
    (folder / "here.py").write_text(HERE)
    (folder / "there.py").write_text(THERE)
    command = [sys.executable, "-c", COMPARE, str(folder)]
    modules = ["here", "there"]
    told = subprocess.run([*command, change, *modules], input="", text=True, capture_output=True, check=True)
    codes = told.stdout.splitlines()[0]
    assert sum(map(len, json.loads(codes).values()))
    done = subprocess.run([*command, "", *modules], input=codes, text=True, capture_output=True, check=True)
    return done.stdout.splitlines()[1]


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("", ""),
        ("import here; here.function = lambda: None", "there.function"),
        (
            "import here, functools; here.function = functools.wraps(here.function)(lambda: 0)",
            "there.function",
        ),
        (
            "import here, wrapt; wrapt.wrap_function_wrapper(here, 'function', lambda w, i, a, k: 0)",
            "there.function",
        ),
        ("import here; here.Kept = type('Kept', (here.Kept,), {})", "there.Kept"),
        ("import here; here.Base = type('New', (), {})", "there.Base"),
        # Who looks it up gets the new one, in a spare as well, once it runs the script.
        ("import here; here.other = lambda: None", ""),
        ("import here; here.Kept.method = lambda self: None", ""),
    ],
    ids=["nothing", "function", "wraps", "wrapt", "class", "base", "not imported by name", "method"],
)
def test_a_change_before_an_import_by_name_is_found(change: str, differs: str, tmp_path: Path) -> None:
    assert compared(tmp_path, change) == differs


def test_objects_that_answer_nothing_are_left_out(tmp_path: Path) -> None:
    """A module may have anything: the rest of it is compared all the same."""
    odd = "class Odd(type):\n    __mro__ = property(lambda cls: 1 / 0)\n"
    change = "import here; here.odd = Odd('odd', (), {}); here.function = lambda: None"
    assert compared(tmp_path, odd + change) == "there.function"
