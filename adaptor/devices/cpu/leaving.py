"""The end of a process on the CPU.

A gloo thread holds the tensors of the last collective until the thread's next run. If the interpreter is
shutting down by then, the release of the tensors aborts the process: a script without an error would fail,
once in some hundred runs on a busy machine (torch 2.13, in scripts that do not destroy their process groups).
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave() -> NoReturn:
    """End the process with code 0, without taking the interpreter down.

    The normal steps of an exit come first, in Python's own order: threads are joined, exit functions run,
    output is flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # whoever reads it is gone: the training is done
            continue
    os._exit(0)
