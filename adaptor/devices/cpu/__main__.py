"""`python -m adaptor.devices.cpu script.py args...`: the script as `__main__`, on the CPU."""

from __future__ import annotations

import os
import runpy
import sys

from adaptor.devices import cpu


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m adaptor.devices.cpu script.py [args...]")
    cpu.activate()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))  # noqa: PTH120  (what python itself does)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
