"""One at a time at a save folder, from whatever machine: both sides of a cut network may publish into it.

The lock is on the draft of the tracker, the file that takes the tracker's place when it is renamed, so there
is no file besides. It goes with the process that holds it, and never has to be broken. Where a file system
has no locks, everyone takes a turn at once: see docs/assumptions.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def turn(draft: Path) -> Iterator[None]:
    """Hold `draft`, which may be written and renamed meanwhile; what is left of it in the end is removed."""
    descriptor = _take(draft)
    try:
        try:
            yield
        except Exception:
            _drop(descriptor, draft)
            raise
        _drop(descriptor, draft)
    finally:
        os.close(descriptor)


def remove_abandoned(draft: Path) -> None:
    """Remove a draft that nobody holds, left by a process that died with it."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError):
        descriptor = os.open(draft, os.O_RDWR | os.O_CLOEXEC)
        try:
            _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _drop(descriptor, draft)
        finally:
            os.close(descriptor)


def _take(draft: Path) -> int:
    while True:
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, fcntl.LOCK_EX)
            if _bears(draft, descriptor):  # else the one before has renamed or removed it
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> None:
    try:
        fcntl.flock(descriptor, kind)
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            raise


def _bears(draft: Path, descriptor: int) -> bool:
    """Whether `draft` still names this file; opened, because a name alone may be remembered (NFS)."""
    try:
        there = os.open(draft, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return os.path.sameopenfile(there, descriptor)
    finally:
        os.close(there)


def _drop(descriptor: int, draft: Path) -> None:
    if _bears(draft, descriptor):
        draft.unlink()
