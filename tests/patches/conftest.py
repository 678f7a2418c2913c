"""Each test runs its script in a new process, because the order of imports matters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from tests.faults import warm
from tests.waiting import captured

Completed = subprocess.CompletedProcess[str]
Run = Callable[..., Completed]

# A framework small enough to read: `core` and `extra` define, `user` and `late` bind names of theirs.
FRAMEWORK = {
    "fake/__init__.py": "",
    "fake/info.py": "__version__ = '1.2.0rc1'\n",
    "fake/core.py": """
def f(x, y=1):
    return x + y

class Base:
    def method(self, x):
        return x

    @classmethod
    def named(cls, x):
        return cls.__name__, x

    @staticmethod
    def free(x):
        return x

class Sub(Base):
    pass
""",
    "fake/extra.py": "def g(a, b):\n    return a - b\n",
    "fake/user.py": "from fake.core import f\n",
    "units.py": """
from adaptor import patching

unit = patching.Unit("pair", framework="fake", tested=">=1,<2", version="fake.info:__version__")

@unit.patch("fake.core:f", why="f is doubled", accepts="(x, y=)")
def doubled(wrapped, instance, args, kwargs):
    return 2 * wrapped(*args, **kwargs)

@unit.patch("fake.extra:g", why="g is negated", accepts="(a, b)")
def negated(wrapped, instance, args, kwargs):
    return -wrapped(*args, **kwargs)
""",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with the fake framework and `units.py`, which patches it."""
    for name, text in FRAMEWORK.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def _environment(folder: Path, variables: Mapping[str, str] | None) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TTP_", "ENABLE_"))}
    path = os.pathsep.join(filter(None, [str(folder), clean.get("PYTHONPATH")]))
    return {**clean, "PYTHONPATH": path, **(variables or {})}


@pytest.fixture
def python(folder: Path) -> Run:
    """Run Python in the folder, with only the given variables of the adaptor.

    The process is a fork of a process that has imported torch, but not the adaptor.
    """

    def run(*arguments: str, env: Mapping[str, str] | None = None, code: int | None = None) -> Completed:
        if arguments[0] == "-c":  # as `-B`: files of the folder are written anew within a second
            program = f"import sys; sys.dont_write_bytecode = True\n{arguments[1]}"
            arguments = ("-c", program, *arguments[2:])
        command = [sys.executable, *arguments]
        return warm.run(command, cwd=folder, env=_environment(folder, env), timeout=240, code=code)

    return run


@pytest.fixture
def cold_python(folder: Path) -> Run:
    """Run Python as `python` does, in a new interpreter.

    For tests that depend on the import of torch or on the hash seed, and for scripts that end with an error:
    a fork would then take all of torch apart.
    """

    def run(*arguments: str, env: Mapping[str, str] | None = None, code: int | None = None) -> Completed:
        command = [sys.executable, "-B", *arguments]
        return captured(command, cwd=folder, env=_environment(folder, env), timeout=240, code=code)

    return run


@pytest.fixture
def holds(python: Run) -> Callable[..., None]:
    """Run a script whose assertions must hold."""
    return partial(_hold, python)


@pytest.fixture
def cold_holds(cold_python: Run) -> Callable[..., None]:
    """As `holds`, in an interpreter of its own."""
    return partial(_hold, cold_python)


def _hold(run: Run, script: str, **env: str) -> None:
    run("-c", script, env=env, code=0)
