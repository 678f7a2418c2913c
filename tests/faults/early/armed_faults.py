"""Installs the hooks for the faults of this process at its import.

A spare process imports the modules of the workers in their order, and runs the script only when it gets a
rank. Hooks installed by the script would therefore come too late: modules that import each other's functions
by name would hold the originals. The faults stand behind `inject.py` in `sys.argv`, in spares as in workers.

The file has its own folder on `sys.path`: Megatron-LM also has a package `tests`, which a spare would import.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_FAULTS = Path(__file__).resolve().parents[1]
_ROOT = str(_FAULTS.parents[1])
_path = list(sys.path)
sys.path[:] = [_ROOT, *(folder for folder in _path if not Path(folder, "tests", "__init__.py").exists())]
from tests.faults import hooks  # noqa: E402
from tests.faults.fault import Fault, Injector  # noqa: E402

sys.path[:] = _path


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="inject.py")
    parser.add_argument("--fault", action="append", type=Fault.parse, default=[], metavar="SPEC")
    parser.add_argument("--stamp", type=Path, help="append a line when a fault strikes")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    (at,) = (place for place, word in enumerate(sys.argv) if Path(word).resolve() == _FAULTS / "inject.py")
    return parser.parse_args(sys.argv[at + 1 :])


options = _parse()
injector = Injector(options.fault, options.stamp)
hooks.install(injector)
