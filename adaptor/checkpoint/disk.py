"""Files and folders on a disk: complete and synced when a function returns, whatever somebody has put beside
them.

Anyone who may write to a save folder can put links, FIFOs, devices and folders there. To read, only regular
files are opened, and no open waits. To write, every file is made anew (O_EXCL) relative to a folder that is
open, and no link is followed: nobody can divert a write to another file of the job's owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path, PurePosixPath
from typing import ParamSpec, Protocol, TypeVar

from adaptor.errors import CheckpointError

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_RENAME_EXCHANGE = 2  # likewise
_FALLOC_KEEP_SIZE = 1  # linux/falloc.h
_AT_FDCWD = -100
_PIECE = 1 << 20  # bytes that are read in one go
_libc = ctypes.CDLL(None, use_errno=True)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Readable(Protocol):
    """A file that is open to be read, packed or not."""

    def read(self, size: int, /) -> bytes: ...


# Errors about the file itself: it is missing, or is no regular file. Any other error is about the machine or
# the file system, and the file may be intact.
_WRONG = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.EINVAL,
        errno.EFBIG,
        errno.ENAMETOOLONG,
        errno.ENXIO,
    )
)

PRIVATE = 0o700  # of a folder that is being written: nobody else can put anything into it


def one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let `function` raise CheckpointError where it met an OSError, or a tree that is too deep to walk."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            place = error.filename or args[0]
            raise CheckpointError(f"{place}: {error.strerror or error} ({function.__name__})") from error
        except RecursionError as error:
            raise CheckpointError(f"{args[0]}: folders are nested too deep ({function.__name__})") from error

    return guarded


def is_wrong(error: OSError) -> bool:
    """Return whether an error in reading tells of damage; else it tells nothing about the file."""
    return error.errno in _WRONG


def files(folder: Path) -> Iterator[Path]:
    """Yield the path of every file below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            yield Path(place, name)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; return False where the system or its filesystem cannot."""
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(one))


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, or a link to one; False where nobody can say."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_same(one: Path, other: Path) -> bool:
    """Return whether both are the same folder; False where nobody can say."""
    try:
        return one == other or one.samefile(other)
    except (OSError, ValueError):
        return False


def free_name(root: Path, name: Callable[[int], str]) -> Path:
    """Return the first name in `root`, by number, that nothing bears yet."""
    return next(path for number in count(1) if not os.path.lexists(path := root / name(number)))


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, for reading; return its descriptor.

    Raises:
        OSError: it is not there, or is a FIFO, a device, a socket or a folder.
    """
    # Looked at before it is opened, because to open a device may act on it; and after, because it may have
    # been replaced in between.
    _require_regular(path.stat(), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def begin_to_write(descriptor: int, begin: int = 0, count: int = 0) -> None:
    """Let the disk begin to write what has come to a file, without waiting for it.

    This is a hint: a file system that does not know it writes at the next sync, which also tells of errors.

    Args:
        descriptor: of the file.
        begin: the place of the first byte.
        count: the number of bytes; 0 is all to the end of the file.
    """
    _libc.sync_file_range(descriptor, ctypes.c_int64(begin), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def reserve(descriptor: int, count: int) -> None:
    """Let the filesystem find room for the first bytes of a file before they are written, all at once.

    This is a hint: one that does not know it, or has no room, finds it, or says so, at each write.

    Args:
        descriptor: of the file, whose size does not change.
        count: the number of bytes.
    """
    _libc.fallocate(descriptor, _FALLOC_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(count))


def _require_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read(path: Path, limit: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: as `open_regular`, or it has more than `limit` bytes.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = read_at_most(file, limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"Larger than {limit} bytes", str(path))
    return content


def read_at_most(file: _Readable, count: int) -> bytes:
    """Return the next `count` bytes of a file, fewer where it ends.

    `file.read(count)` takes memory for `count` bytes first, which may be far more than there are.

    Args:
        file: is read from where it stands.
        count: in bytes.
    """
    pieces = []
    while count and (piece := file.read(min(count, _PIECE))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def create(folder: Path, name: str) -> int:
    """Make the file `name` (with `/`) below `folder` anew, and the folders between; return its descriptor.

    A file of this name is removed first. No link is followed below `folder`, and `folder` must not be one.

    Raises:
        OSError: `folder` is not there, a part of `name` is a link or a file, or the disk refuses.
    """
    *between, last = PurePosixPath(name).parts
    where = os.open(folder, _FOLDER)
    try:
        for part in between:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=where)
            inner = os.open(part, _FOLDER, dir_fd=where)
            os.close(where)
            where = inner
        try:
            return os.open(last, _ANEW, 0o666, dir_fd=where)
        except FileExistsError:
            os.unlink(last, dir_fd=where)
            return os.open(last, _ANEW, 0o666, dir_fd=where)
    except OSError as error:
        error.filename = str(folder / name)
        raise
    finally:
        os.close(where)


def open_below(folder: Path, name: str, flags: int) -> int:
    """Open a regular file below a folder; return its descriptor.

    Args:
        folder: no link is followed below it, and it must not be one.
        name: of the file, with `/`.
        flags: of os.open, for reading or for writing.

    Raises:
        OSError: it is not there, or is no regular file.
    """
    *between, last = PurePosixPath(name).parts
    where = os.open(folder, _FOLDER)
    try:
        for part in between:
            inner = os.open(part, _FOLDER, dir_fd=where)
            os.close(where)
            where = inner
        descriptor = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where)
    finally:
        os.close(where)
    try:
        _require_regular(os.fstat(descriptor), folder / name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ANEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write(folder: Path, name: str, content: bytes) -> None:
    """Make a file `name` with this `content` in `folder`, on disk."""
    with os.fdopen(create(folder, name), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(folder: Path, name: str, content: bytes) -> None:
    """Let `name` in `folder` become a file with this `content`, at once or not at all; it may be a link."""
    draft = f"{name}.{secrets.token_hex(4)}{DRAFT}"
    where = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.fdopen(os.open(draft, _ANEW, 0o666, dir_fd=where), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, name, src_dir_fd=where, dst_dir_fd=where)
        os.fsync(where)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=where)
        if isinstance(error, OSError):
            error.filename = str(folder / name)
        raise
    finally:
        os.close(where)


PROBE = ".ttp-"  # begins the names of what is made and removed at once, to see its owner and its rights
DRAFT = ".tmp"  # ends the names of what `replace` writes first


def make_private(folder: Path) -> None:
    """Make a folder into which only this user can put anything, until `share`."""
    folder.mkdir(PRIVATE)


def ensure_private(folder: Path) -> None:
    """Make a folder as `make_private` does, unless another process of this user has.

    Raises:
        CheckpointError: what is there is a link or a file, or belongs to another user.
    """
    try:
        make_private(folder)
        return
    except FileExistsError:
        status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise CheckpointError(f"{folder}: is not a folder, so nothing is written there; remove it")
    if status.st_uid != _owner_below(folder.parent, os.geteuid()):
        raise CheckpointError(f"{folder}: belongs to user {status.st_uid}, so nothing is written there")


@functools.lru_cache
def _owner_below(root: Path, user: int) -> int:
    """Return the owner of what a process of `user` makes in `root`; tried out once, not at each save."""
    return probe(root).st_uid


def probe(folder: Path) -> os.stat_result:
    """Return what the system says of a file that this process makes in `folder`: its owner and its rights.

    The user number of the process does not tell: a server may give another one to root, and know no rights.
    """
    path = folder / f"{PROBE}{secrets.token_hex(4)}"
    made = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        return os.fstat(made)
    finally:
        os.close(made)


def name_user(number: int) -> str:
    """Return `number` and the name that this machine has for it, for a person."""
    try:
        return f"user {number} ({pwd.getpwuid(number).pw_name})"
    except (KeyError, OSError):
        return f"user {number}"


def share(folder: Path) -> None:
    """Give a folder the rights that it would have had if it had been made as others are.

    An empty folder in it has them: the umask is not all, the folder above may give default rights (ACL) to
    all below it. A file system without rights, or with troubles, changes nothing: nothing is lost for its
    rights.
    """
    with contextlib.suppress(OSError):
        sample = folder / f"{PROBE}rights"
        with contextlib.suppress(FileExistsError):  # of a process that has died in here
            sample.mkdir(0o777)
        try:
            rights = sample.lstat().st_mode & 0o777
        finally:
            sample.rmdir()
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o777 | rights)


def sync(path: Path) -> None:
    """fsync of a regular file or a folder."""
    if not stat.S_ISDIR(path.stat().st_mode):
        descriptor = open_regular(path)
    else:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folders(folder: Path) -> None:
    """fsync of a folder and of those below it."""
    for place, _, _ in os.walk(folder, topdown=False):
        sync(Path(place))


def discard(folder: Path) -> None:
    """Remove a folder in which somebody may be writing: its room is free at once, not when they are done."""
    for path in files(folder):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    remove(folder)


def remove(path: Path) -> None:
    """Remove a folder and what is below it, or what has its name in its place, if it is there."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
