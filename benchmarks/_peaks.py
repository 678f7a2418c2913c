"""The peak memory of this process, in a step and in a dump."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def new_peak() -> int:
    """Begin a new peak of this process's memory; return the current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the largest resident memory since the last new peak, in bytes."""
    (kibibytes,) = re.findall(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kibibytes)


class Peaks:
    """Compares the peak of a dump with the peak of the last step before the dump.

    After a fault the main threads of other ranks continue: their memory during a dump includes that of a
    step.
    """

    def __init__(self) -> None:
        self._of_step = 0
        self._before = 0

    def step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        """Measure a step; a wrapper of the function that makes the step."""
        new_peak()
        result = wrapped(*args, **kwargs)
        self._of_step = peak()
        return result

    def begin(self) -> None:
        """Begin to measure a dump."""
        self._before = new_peak()

    def end(self) -> dict[str, int]:
        """Return the bytes that the dump took above the memory at its start, and above the peak of a step."""
        highest = peak()
        return {"extra": highest - self._before, "above_step": highest - self._of_step}
