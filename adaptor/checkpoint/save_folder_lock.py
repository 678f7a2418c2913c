"""The lock of a save folder, for processes of all machines: both sides of a cut network may publish into the
folder.

The lock is on a file of its own, which exists only while a process holds the lock or waits for it. The lock
ends with its process, and never has to be broken. Only this user can open the file, so no other user with
read permission for the folder can hold the lock; a file of another user is removed. Where a file system has
no locks, every process holds the lock at once: see docs/assumptions.md.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from adaptor.checkpoint import disk
from adaptor.errors import CheckpointError
from adaptor.protocol import naming

# The lock is held for some renames and fsyncs of a folder: a slow disk needs seconds. An NFSv4 server frees
# the lock of a dead client when its lease ends, after 90 s. A process that holds the lock for longer is
# stopped, or its disk hangs, and a save that waits without end is worse than a save that fails with a line.
PATIENCE_S = 100.0
# flock has no time-out: the pause between two tries.
_AGAIN_S = 0.05
_HAS_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextlib.contextmanager
def locked(root: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the lock of the save folder `root`.

    Raises:
        CheckpointError: another process of this user has held the lock for longer than `patience_s`.
        OSError: the disk refuses.
    """
    lock = root / naming.LOCK
    descriptor = _take(lock, time.monotonic() + patience_s, patience_s)
    try:
        try:
            yield
        except Exception:
            _drop(descriptor, lock)
            raise
        _drop(descriptor, lock)
    finally:
        os.close(descriptor)


def _take(lock: Path, until: float, patience_s: float) -> int:
    while True:
        descriptor = _open(lock)
        try:
            if _is_locked(descriptor):
                if _bears(lock, descriptor):  # otherwise the former holder has removed the file
                    return descriptor
            elif not _is_of_this_user(lock.parent, descriptor):
                disk.remove(lock)
            elif time.monotonic() >= until:
                raise CheckpointError(
                    f"{lock}: {_holder(descriptor)} has held it for {patience_s:g} s, so nothing is"
                    " published: it is stopped, or its disk hangs"
                )
            else:
                time.sleep(_AGAIN_S)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(lock: Path) -> int:
    """Open the lock's file, made if missing; a file that this user cannot open is removed."""
    try:
        descriptor = os.open(lock, _OPEN | os.O_CREAT, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise
        if not os.path.lexists(lock):
            raise  # the folder refuses
        disk.remove(lock)
        return os.open(lock, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # processes do not share a FIFO
        os.close(descriptor)
        disk.remove(lock)
        return os.open(lock, _OPEN | os.O_CREAT | os.O_EXCL, 0o600)
    return descriptor


def _is_locked(descriptor: int) -> bool:
    """Take the lock, unless another process has it; return True if taken."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _HAS_NO_LOCKS:
            raise
    return True


def _is_of_this_user(root: Path, descriptor: int) -> bool:
    """Return True if the file has the owner and the rights of a file that this process makes in the
    folder.
    """
    probe_status, lock_status = disk.probe_rights(root), os.fstat(descriptor)
    return (probe_status.st_uid, probe_status.st_mode) == (lock_status.st_uid, lock_status.st_mode)


def _holder(descriptor: int) -> str:
    """Return the name of the process that holds a lock on the file, as far as this machine knows."""
    inode = f":{os.fstat(descriptor).st_ino}"
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/locks").read_text().splitlines():
            lock_fields = line.split()
            if lock_fields[1] == "FLOCK" and lock_fields[5].endswith(inode):
                return f"process {lock_fields[4]}"
    return "a process of another machine"


def _bears(lock: Path, descriptor: int) -> bool:
    """Return True if `lock` still names this file; opened, because NFS may remember a name alone."""
    try:
        lock_descriptor = os.open(lock, _OPEN)
    except OSError:  # gone, or replaced
        return False
    try:
        return os.path.sameopenfile(lock_descriptor, descriptor)
    finally:
        os.close(lock_descriptor)


def _drop(descriptor: int, lock: Path) -> None:
    if _bears(lock, descriptor):
        lock.unlink()
