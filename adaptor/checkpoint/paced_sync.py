"""Syncs files while they are written: a single long sync at the end would look like a halt."""

from __future__ import annotations

import os
import time

from adaptor.checkpoint import linux_calls

# The longest stretch between two syncs, in bytes.
_LONGEST = 512 << 20
# The next stretch is what the disk takes in this time, by the last one; it is at most so many times as long.
_QUICK_S = 1.0
_GROWTH = 64
# Between two syncs the disk is told to begin after so many bytes: it works while the next ones are made.
_BEGIN = 4 << 20


class PacedSync:
    """Syncs after stretches of bytes, whose length follows the speed of the disk.

    Args:
        shortest: bytes of the first stretch; none is shorter.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest = self._stretch = shortest
        self._waiting = 0  # bytes since the last sync
        self._idle = 0  # bytes since the disk was last told to begin

    def wrote(self, descriptor: int, count: int) -> None:
        """Note that `count` bytes were written to a file; sync it where a stretch ends. Raises OSError."""
        self._waiting += count
        self._idle += count
        if self._waiting >= self._stretch:
            began = time.monotonic()
            os.fdatasync(descriptor)
            growth = _QUICK_S / max(time.monotonic() - began, _QUICK_S / _GROWTH)
            self._stretch = min(max(int(growth * self._stretch), self._shortest), _LONGEST)
            self._waiting = self._idle = 0
        elif self._idle >= _BEGIN:
            linux_calls.begin_to_write(descriptor)
            self._idle = 0
