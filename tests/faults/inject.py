"""Runs a training script in which something breaks: `inject.py --fault SPEC [...] -- script args...`.

SPEC is `rank=1,step=6,phase=backward,kind=sigkill` and may go on with `code=7` (of os._exit and sys.exit),
`also=3` (a rank of this machine that is killed at the same moment) and `restart=1` (the start of the workers
it belongs to; the first is 0). With `--stamp FILE` a line of JSON is appended when a fault strikes.
Everything is hooked from outside, in the framework and in the adaptor, by functions that do nothing else.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

# The script is run by its path, in a folder of the user's.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.faults import hooks
from tests.faults.fault import Fault


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fault", action="append", type=Fault.parse, default=[], metavar="SPEC")
    parser.add_argument("--stamp", type=Path, help="append a line when a fault strikes")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    parsed = parser.parse_args()
    hooks.install(parsed.fault, parsed.stamp)
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = str(Path(parsed.script).resolve().parent)
    runpy.run_path(parsed.script, run_name="__main__")


if __name__ == "__main__":
    main()
