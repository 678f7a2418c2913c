"""Stops and continues an uploader every few steps of one job, and measures a step: for `_worker.py`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _blocks import Blocks, Measured


class Uploading:
    """The measurement of one rank.

    Args:
        add: writes a line of results.
        hook: wraps a function once its module is imported.
        settings: steps in a block, pairs of blocks, the seed of their order, steps before them, and the
            process of the uploader.
    """

    def __init__(
        self, add: Callable[..., None], hook: Callable[[str, str, Any], None], settings: str
    ) -> None:
        block, pairs, seed, warm_up, self._process = map(int, settings.split(","))
        self._began: Measured = {}
        blocks = Blocks(
            add, block, pairs, seed, turn=self._turn, begin=self._begin, end=self._end, warm_up=warm_up
        )
        hook("megatron.training.training", "train_step", blocks.step)

    def _turn(self, on: bool) -> None:
        # Every rank does this: another rank may be the first to continue.
        with contextlib.suppress(ProcessLookupError):  # the uploader has ended; the benchmark reports that
            os.kill(self._process, signal.SIGCONT if on else signal.SIGSTOP)

    def _begin(self) -> None:
        self._began = self._now()

    def _end(self, steps: int) -> Measured:
        return {name: (value - self._began[name]) / steps for name, value in self._now().items()}

    def _now(self) -> Measured:
        """Return milliseconds of wall time and of this process's CPU time, and the MB that were sent."""
        # The uploader reads only files, and answers of some bytes.
        (read,) = re.findall(r"^rchar: (\d+)$", Path(f"/proc/{self._process}/io").read_text(), re.MULTILINE)
        return {
            "wall": time.perf_counter_ns() / 1e6,
            "cpu": time.process_time_ns() / 1e6,
            "sent": int(read) / 1e6,
        }
