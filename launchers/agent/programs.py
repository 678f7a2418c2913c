"""The programs that an agent starts, and how a program is ended.

Programs are started by their paths: with `python -m` the working directory would be on `sys.path`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_LAUNCHERS = Path(__file__).absolute().parents[1]
# The first program of a worker.
WORKER = _LAUNCHERS / "agent" / "worker_main.py"
# Waits to become a worker.
SPARE = _LAUNCHERS / "spares" / "spare_main.py"
# Serves the files of a job.
SERVE = _LAUNCHERS / "operations" / "serve_main.py"
# Works with object stores.
STORE = _LAUNCHERS / "store" / "store_main.py"


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """Close the stdin of a program, which ends the program.

    Args:
        within_s: the seconds after which the process is killed.
    """
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
