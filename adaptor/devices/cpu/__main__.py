"""`python -m adaptor.devices.cpu [--module] script [args...]`: the script as `__main__`, on the CPU."""

from __future__ import annotations

import sys

from adaptor import _script
from adaptor.devices import cpu
from adaptor.devices.cpu import leaving


def main() -> None:
    arguments = sys.argv[1:]
    if arguments in ([], [_script.MODULE_FLAG]):
        sys.exit("usage: python -m adaptor.devices.cpu [--module] script [args...]")
    cpu.activate()
    try:
        _script.run(arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    leaving.leave()


if __name__ == "__main__":
    main()
