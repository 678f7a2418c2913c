"""`python -m adaptor.devices NAME [--module] script [args...]`: the script as `__main__`, on a device.

Nothing else of the adaptor takes part. NAME is a value of TTP_DEVICE: `cpu`, or a device of a plug-in.
"""

from __future__ import annotations

import sys

from adaptor import _script

_USAGE = "usage: python -m adaptor.devices NAME [--module] script [args...]"


def main() -> None:
    """Run a script of the user with the stand-ins of a device."""
    _script.leave_own_path()
    from adaptor import devices
    from adaptor.errors import AdaptorError

    name, *arguments = sys.argv[1:] or [""]
    if arguments in ([], [_script.MODULE_FLAG]):
        sys.exit(_USAGE)
    try:
        leave = devices.activate(name)
    except AdaptorError as error:
        sys.exit(f"python -m adaptor.devices: {error}")
    try:
        _script.run(arguments)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    leave()


if __name__ == "__main__":
    main()
