"""Lets the kernel read a checkpoint while processes that will load it are still starting.

Last words are written past the page cache (`direct_writes`), so a restart has to read them from the disk.
While its workers import their modules, the disk is idle. Reading ahead is a hint: the load reads whatever
was not read before.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from adaptor.checkpoint import disk, linux_calls, manifest

_MEMORY = Path("/proc/meminfo")
# The system takes few requests at a time; it leaves out what is asked for beyond a few of these.
_PIECE = 1 << 20


def begin(folder: Path) -> None:
    """Start to read a checkpoint in a thread, for which nothing waits.

    Args:
        folder: of the checkpoint.
    """

    def work() -> None:
        with contextlib.suppress(Exception):  # it only saves time
            read_ahead(folder, _available() // 2)

    with contextlib.suppress(RuntimeError):  # no thread can be had
        threading.Thread(target=work, name="ttp-read-ahead", daemon=True).start()


def read_ahead(folder: Path, limit_bytes: int) -> int:
    """Ask the kernel to read the files of a checkpoint that is on a disk of this machine.

    A file system that machines share is left alone: each of them would read what others load.

    Args:
        folder: of the checkpoint.
        limit_bytes: bytes; nothing of a larger one is read.

    Returns:
        The bytes that were asked for.

    Raises:
        CheckpointError: it has no manifest.
        OSError: a file cannot be opened.
    """
    saved_manifest = manifest.read(folder)
    if sum(file.bytes for file in saved_manifest.files) > limit_bytes:
        return 0
    requested_bytes = 0
    for file in saved_manifest.files:
        descriptor = disk.open_regular(folder / file.path)
        try:
            if not linux_calls.is_on_own_disk(descriptor):
                return requested_bytes
            for begin in range(0, file.bytes, _PIECE):
                os.posix_fadvise(descriptor, begin, _PIECE, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)
        requested_bytes += file.bytes
    return requested_bytes


def _available() -> int:
    """Return the bytes of memory that the kernel can give without taking any from processes."""
    for line in _MEMORY.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0
