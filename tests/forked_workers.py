"""Saves CPU time of pytest-xdist's workers: they import and compile together, and begin with long tests.

- Workers are forks of one process that has torch imported (`tests/faults/warm.py`). Otherwise each worker
  imports torch for itself, and starts a starter for the processes of its tests, which imports it once more:
  with five workers a tenth of the CPU time of `make check`.
- In a new checkout one process compiles all tests before the first worker is forked. All workers collect at
  the same time, and each would compile all tests, in 15 CPU seconds.
- Each worker begins with its share of the long tests: a long test that begins last runs alone, while the
  other processors wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from tests.faults.warm import WithStarter


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Replace what starts the workers, before the first is started."""
    if "TTP_TEST_COLD" in os.environ:
        return
    from execnet import gateway_io
    from execnet.gateway_base import Popen2IO

    compiled = _compile(config)

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            # The starter imports while the tests are compiled; the worker begins when this returns.
            self.popen = WithStarter(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if compiled is not None:
                compiled.wait()
            Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster = Forked  # type: ignore[misc]


def _compile(config: pytest.Config) -> subprocess.Popen[bytes] | None:
    """Start a process that compiles the tests as pytest does; None: they are compiled, or never kept."""
    kept = Path(cache_from_source(str(Path(__file__).with_name("unit") / "conftest.py"))).parent
    if sys.dont_write_bytecode or kept.exists():
        return None
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    # Its errors are those of the workers, which print them.
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen([*command, *config.args], cwd=config.invocation_params.dir, **streams)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put a share of the long tests before each worker's share of the others (`--dist worksteal`).

    The order within the long tests stays: neighbours share fixtures.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.get_closest_marker("integration")]
    short = [item for item in items if not item.get_closest_marker("integration")]
    items[:] = []
    while workers:
        for part in (long, short):
            count = len(part) // workers
            items += part[:count]
            del part[:count]
        workers -= 1
