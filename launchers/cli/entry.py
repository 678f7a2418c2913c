"""The program `ttprun`: Ctrl-C is one line from the beginning, also during the import of `ttprun.py`.

Only during the start of Python and of the package (some hundredths of a second) Ctrl-C is Python's
traceback. So the module imports nothing that Python has not imported by then.
"""

from __future__ import annotations

import os

_SIGINT = 2  # `signal` may not be imported yet


def main() -> int:
    """Run a job; return its exit code (docs/exit_codes.md)."""
    try:
        from adaptor.launchers.cli import ttprun

        code = ttprun.main()
    except KeyboardInterrupt:  # torch handles the signal only from the rendezvous on
        try:
            os.write(2, b"[ttp] ended by SIGINT, before anything was started\n")
        except OSError:
            pass
        return 128 + _SIGINT
    _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process, without the destruction of torch's modules: half a second of CPU time, and ten seconds
    on a busy machine, in which a scheduler would end the process by SIGKILL.
    """
    import atexit
    import threading

    from adaptor import output

    # In the interpreter's order: threads, then exit functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    output.leave(code)
