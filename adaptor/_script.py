"""Runs the user's script in this process, as `python script.py` and `python -m module` would."""

from __future__ import annotations

import sys

_AT_START = frozenset(sys.modules)  # what Python itself has imported by now, and nobody else

import builtins  # noqa: E402
import importlib.machinery  # noqa: E402
import io  # noqa: E402
import os  # noqa: E402
import pkgutil  # noqa: E402
import runpy  # noqa: E402
import types  # noqa: E402
from pathlib import Path  # noqa: E402

MODULE_FLAG = "--module"


def leave_own_path() -> None:
    """Remove the first entry of `sys.path`, which Python added for its start program.

    The entry is the program's folder, or with `python -m` the working directory: a file there with the name
    of a module would be imported in the module's place. A program of the adaptor calls the function once,
    first of all.
    """
    if not _is_safe():
        del sys.path[0]


def run(arguments: list[str]) -> None:
    """Run `[--module] script [its arguments]` as `__main__`; whatever the script raises passes through.

    `leave_own_path` was called before.
    """
    if arguments[0] == MODULE_FLAG:
        sys.argv = arguments[1:]
        _put_first(Path.cwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        take_over(arguments)
        if pkgutil.get_importer(sys.argv[0]) is None:
            _run_file(os.path.join(os.getcwd(), sys.argv[0]))  # noqa: PTH109, PTH118  # as Python does
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")


def _run_file(path: str) -> None:
    """Run a file as Python does: `__file__` is absolute, `sys.argv[0]` is not, which runpy cannot do.

    The module stays `__main__` afterwards: code that runs at the end of the interpreter may look there.
    """
    with io.open_code(path) as file:
        code = pkgutil.read_code(file)  # of a file that is compiled
    if code is None:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __cached__=None, __builtins__=builtins)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def take_over(arguments: list[str]) -> None:
    """Set `sys.argv` and `sys.path` as for `python script [its arguments]`; see `leave_own_path`."""
    sys.argv = arguments
    if pkgutil.get_importer(arguments[0]) is None:  # else a folder or an archive, which runpy puts there
        _put_first(Path(arguments[0]).resolve().parent)


def _put_first(folder: Path) -> None:
    if not _is_safe():
        sys.path.insert(0, str(folder))
        _forget_shadowed(str(folder))


def _is_safe() -> bool:
    """Return whether Python puts nothing first on `sys.path` (-P, PYTHONSAFEPATH; since 3.11)."""
    return bool(getattr(sys.flags, "safe_path", False))


def _forget_shadowed(folder: str) -> None:
    """Let the script import its own modules, also if a module used by the adaptor has the same name.

    The adaptor keeps its imported modules.
    """
    try:
        names_there = {entry.name.partition(".")[0] for entry in Path(folder).iterdir()}
    except OSError:  # Python finds nothing there, either
        return
    for name in names_there & ({name.partition(".")[0] for name in sys.modules} - _AT_START - {"adaptor"}):
        spec = importlib.machinery.PathFinder.find_spec(name, [folder])
        if spec is None or spec.origin is None or spec.origin == _origin(name):
            continue
        for loaded in [
            module_name
            for module_name in sys.modules
            if module_name == name or module_name.startswith(f"{name}.")
        ]:
            del sys.modules[loaded]


def _origin(name: str) -> str | None:
    return getattr(getattr(sys.modules.get(name), "__spec__", None), "origin", None)
