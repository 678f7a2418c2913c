"""`python -m adaptor`: its commands are in `commands.py`.

Ctrl-C ends it without a traceback from the beginning, while these are being imported, too. So nothing is
imported here that Python has not imported by then.
"""

from __future__ import annotations

import sys

_SIGINT = 2  # `signal` may not be there yet


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit code, 130 after Ctrl-C."""
    try:
        from adaptor import commands

        return commands.run(arguments)
    except KeyboardInterrupt:
        return 128 + _SIGINT


if __name__ == "__main__":
    sys.exit(main())
