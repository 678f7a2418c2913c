"""Calls of Linux for files that Python does not offer.

Two calls are hints, which a file system may ignore; `exchange` returns whether the file system supports it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_RENAME_EXCHANGE = 2  # linux/fs.h
_FALLOC_KEEP_SIZE = 1  # linux/falloc.h
_AT_FDCWD = -100
_STATFS_BYTES = 256  # more than the structure has; the number of the file system stands first, in a long
_OWN_DISK = frozenset((0xEF53, 0x58465342))  # linux/magic.h: ext4 and xfs
_libc = ctypes.CDLL(None, use_errno=True)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; return False if the system or its file system cannot.

    Raises:
        OSError: the swap is supported, and has failed: a name is missing, or the folder may not be changed.
    """
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(first))


def begin_to_write(descriptor: int, begin: int = 0, count: int = 0) -> None:
    """Let the disk begin to write the content of a file, without a wait.

    This is a hint: a file system without support writes at the next sync, which also reports errors.

    Args:
        descriptor: of the file.
        begin: the place of the first byte.
        count: the number of bytes; 0: to the end of the file.
    """
    _libc.sync_file_range(descriptor, ctypes.c_int64(begin), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def reserve(descriptor: int, count: int) -> None:
    """Let the file system find room for the first bytes of a file before they are written, all at once.

    This is a hint: a file system without support, or without room, finds room or reports an error at each
    write.

    Args:
        descriptor: of the file, whose size does not change.
        count: the number of bytes.
    """
    _libc.fallocate(descriptor, _FALLOC_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(count))


def is_on_own_disk(descriptor: int) -> bool:
    """Return True if a file is on a file system (ext4, xfs) that only this kernel writes to.

    Args:
        descriptor: of the file.
    """
    status_buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, status_buffer) != 0:
        return False
    return ctypes.c_long.from_buffer(status_buffer).value in _OWN_DISK
