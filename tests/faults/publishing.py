"""Runs ttprun with a fault while it publishes: `TTP_TEST_PUBLISHING="NODE POINT KIND" publishing.py ...`.

POINT is `name` (before any rename), `move-in` (every file has its final name, the folder not yet) or
`announce` (the folder has its name, the tracker is old). KIND is `sigkill`, `error` (the disk is read-only
from then on) or `sigstop` (the process continues once the tracker names a checkpoint).
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import wrapt

sys.path.append(str(Path(__file__).resolve().parents[2]))

from adaptor.checkpoint import publish
from adaptor.launchers.cli import ttprun
from adaptor.protocol.naming import TRACKER

VARIABLE = "TTP_TEST_PUBLISHING"


def main() -> int:
    node, point, kind = os.environ[VARIABLE].split()
    if sys.argv[sys.argv.index("--node-rank") + 1] == node:

        def breaks(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            print(f"[test] {kind} at {point}", flush=True)
            if kind == "sigkill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "sigstop":
                tracker, pid = args[0].parent / TRACKER, os.getpid()
                until = f"until test -s '{tracker}'; do sleep 0.05; done"
                subprocess.run(["sh", "-c", f"kill -STOP {pid}; {until}; kill -CONT {pid}"], check=True)
                return wrapped(*args, **kwargs)
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        name = {"name": "_name", "move-in": "move_in", "announce": "_tell_tracker"}[point]
        wrapt.wrap_function_wrapper(publish, name, breaks)
    return ttprun.main()


if __name__ == "__main__":
    sys.exit(main())
