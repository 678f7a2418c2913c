"""Syncs files while they are written: a single long sync at the end would look like a halt."""

from __future__ import annotations

import os
import time

# The longest stretch between two syncs, in bytes. Stretches grow while the disk takes each in less than this.
_LONGEST = 256 << 20
_QUICK_S = 1.0


class PacedSync:
    """Syncs after stretches of bytes, whose length follows the speed of the disk.

    Args:
        shortest: bytes of the first stretch; none is shorter.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest = self._stretch = shortest
        self._waiting = 0

    def wrote(self, descriptor: int, count: int) -> None:
        """Note that `count` bytes were written to a file; sync it where a stretch ends. Raises OSError."""
        self._waiting += count
        if self._waiting < self._stretch:
            return
        began = time.monotonic()
        os.fdatasync(descriptor)
        is_quick = time.monotonic() - began < _QUICK_S
        self._stretch = (
            min(2 * self._stretch, _LONGEST) if is_quick else max(self._stretch // 2, self._shortest)
        )
        self._waiting = 0
