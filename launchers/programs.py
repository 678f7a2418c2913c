"""The programs that an agent starts, and how one of them is ended. They are started by their paths: with
`python -m` the working directory would stand on `sys.path`."""

from __future__ import annotations

import subprocess
from pathlib import Path

# What a worker runs first.
WORKER = Path(__file__).with_name("worker_main.py").absolute()
# What waits to become a worker.
SPARE = Path(__file__).with_name("spare_main.py").absolute()
# What serves the files of a job.
SERVE = Path(__file__).with_name("serve_main.py").absolute()
# What asks an object store for ttprun.
STORE = Path(__file__).with_name("store_main.py").absolute()
# What brings the data of a job.
DATA = Path(__file__).with_name("data_main.py").absolute()


def end(process: subprocess.Popen[bytes], within_s: float) -> None:
    """End a process of one of these programs that ends when its stdin does; kill it after `within_s`."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
