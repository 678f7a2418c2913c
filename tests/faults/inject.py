"""Runs a training script in which something breaks: `inject.py --fault SPEC [...] -- script args...`.

SPEC is `rank=1,step=6,phase=backward,kind=sigkill` and may go on with `code=7` (of os._exit and sys.exit),
`also=3` (a rank of this machine that is killed at the same moment) and `restart=1` (the start of the workers
it belongs to; the first is 0). With `--stamp FILE` a line of JSON is appended when a fault strikes.
Everything is hooked from outside, in the framework and in the adaptor, by functions that do nothing else.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# The script is run by its path, in a folder of the user's.
sys.path += [str(_HERE.parents[1]), str(_HERE / "early")]


def main() -> None:
    import armed_faults  # here, as it reads `sys.argv` and hooks what is imported from now on

    from tests.faults.fault import tell_siblings

    armed_faults.injector.begin()
    tell_siblings()
    armed_faults.injector.reach("imports")
    given = armed_faults.given
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = str(Path(given.script).resolve().parent)
    runpy.run_path(given.script, run_name="__main__")
    armed_faults.injector.reach("finished")


if __name__ == "__main__":
    main()
