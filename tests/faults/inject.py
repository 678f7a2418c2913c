"""Runs a training script in which faults strike: `inject.py --fault SPEC [...] -- script args...`.

SPEC is `rank=1,step=6,phase=backward,kind=sigkill` with the fields of `tests/faults/fault.py`. Optional
fields are `code=7` (for os._exit and sys.exit), `also=3` (a rank of this machine to kill at the same moment)
and `restart=1` (the generation of the workers; the first is 0). `--stamp FILE` appends a line of JSON when a
fault strikes. The hooks in the framework and in the adaptor are installed from outside and have no other
effect.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
# The script is run by its path, in any folder.
sys.path += [str(_HERE.parents[1]), str(_HERE / "early")]


def main() -> None:
    import armed_faults  # imported here: it reads `sys.argv`, and hooks all later imports

    from tests.faults.fault import tell_siblings

    armed_faults.injector.begin()
    tell_siblings()
    armed_faults.injector.reach("imports")
    options = armed_faults.options
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")
    armed_faults.injector.reach("finished")


if __name__ == "__main__":
    main()
