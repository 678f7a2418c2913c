"""The program `ttprun`: Ctrl-C is one line from the beginning, while `ttprun.py` is being imported, too.

Only during Python's own start, and that of the package, Ctrl-C is Python's traceback (some hundredths of a
second). So nothing is imported here that Python has not imported by then.
"""

from __future__ import annotations

import os

_SIGINT = 2  # `signal` may not be there yet


def main() -> int:
    """Run a job; return its exit code (docs/exit_codes.md)."""
    try:
        from adaptor.launchers.cli import ttprun

        return ttprun.main()
    except KeyboardInterrupt:  # torch hears the signal only from the rendezvous on
        try:
            os.write(2, b"[ttp] ended by SIGINT, before anything was started\n")
        except OSError:
            pass
        return 128 + _SIGINT
