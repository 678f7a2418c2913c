"""`python -m adaptor`: its commands are in `commands.py`.

Ctrl-C ends the program without a traceback from the beginning, also during the import of the commands.
Therefore the module imports only modules that Python has imported at its start.
"""

from __future__ import annotations

import sys

_SIGINT = 2  # `signal` may not be there yet


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code, 130 after Ctrl-C."""
    try:
        from adaptor import commands

        return commands.run(arguments)
    except KeyboardInterrupt:
        return 128 + _SIGINT


if __name__ == "__main__":
    sys.exit(main())
