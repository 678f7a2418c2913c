"""The program `ttprun`: Ctrl-C is one line from the beginning, while `ttprun.py` is being imported, too."""

from __future__ import annotations

import contextlib
import os
import signal


def main() -> int:
    """Run a job; return its exit code (docs/exit_codes.md)."""
    try:
        from adaptor.launchers import ttprun

        return ttprun.main()
    except KeyboardInterrupt:  # torch hears the signal only from the rendezvous on
        with contextlib.suppress(OSError):
            os.write(2, b"[ttp] ended by SIGINT, before anything was started\n")
        return 128 + signal.SIGINT
