"""File descriptors reserved for an incident, when a process may have no free descriptor, and descriptors of
files in memory.
"""

from __future__ import annotations

import contextlib
import os

# The flag MFD_NOEXEC_SEAL of Linux 6.3 and later, without which that may refuse files in memory
# (vm.memfd_noexec); Python 3.11 has no name for it.
_MFD_NOEXEC_SEAL = 0x8


def in_memory(name: str) -> int:
    """Return the descriptor of a file in memory. Raises OSError."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # an older system does not know the second one
        return os.memfd_create(name, os.MFD_CLOEXEC)


class Descriptors:
    """`count` descriptors, or fewer if the limit is reached, held until `release`."""

    def __init__(self, count: int) -> None:
        self._kept: list[int] = []
        with contextlib.suppress(OSError):
            while len(self._kept) < count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def release(self) -> None:
        """Close the descriptors: others may be opened in their place."""
        while self._kept:
            with contextlib.suppress(OSError):
                os.close(self._kept.pop())
