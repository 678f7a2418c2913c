"""Lets pytest-xdist's workers be forks of one process that has torch imported (`tests/faults/warm.py`).

Otherwise each worker imports torch for itself, and starts a starter for the processes of its tests, which
imports it once more: with five workers a tenth of the CPU time of `make check`.
"""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.faults.warm import WithStarter


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Replace what starts the workers, before the first is started."""
    if "TTP_TEST_COLD" in os.environ:
        return
    from execnet import gateway_io
    from execnet.gateway_base import Popen2IO

    class Forked(gateway_io.Popen2IOMaster):
        def __init__(self, args: list[str], execmodel: Any) -> None:
            self.popen = WithStarter(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster = Forked  # type: ignore[misc]
