"""Running the user's script in this process, as `python script.py` and `python -m module` would."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

MODULE_FLAG = "--module"


def run(arguments: list[str]) -> None:
    """Run `[--module] script [its arguments]` as `__main__`; whatever the script raises passes through.

    For processes that were started with `python -m`.
    """
    if arguments[0] == MODULE_FLAG:
        sys.argv = arguments[1:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        take_over(arguments)
        runpy.run_path(sys.argv[0], run_name="__main__")


def take_over(arguments: list[str]) -> None:
    """Make `sys.argv` and `sys.path` those of `python script [its arguments]`."""
    sys.argv = arguments
    if not getattr(sys.flags, "safe_path", False):  # since 3.11: then nothing stands there
        sys.path[0] = str(Path(arguments[0]).resolve().parent)
