"""Files and folders on a disk: complete and synced when a function returns, whatever lies beside them.

Any user with write permission for a save folder can put links, FIFOs, devices and folders there. For reading,
only regular files are opened, and no open waits. For writing, every file is made anew (O_EXCL) relative to an
open folder, and no link is followed: no user can divert a write to another file of the job's owner.

A checkpoint is made in a private folder, into which no other user can write (`make_private`, `share_folder`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import io
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path, PurePosixPath
from typing import ParamSpec, TypeVar

from adaptor.errors import CheckpointError

_PIECE = 1 << 20  # bytes of one read
DRAFT = ".tmp"  # the end of the names of drafts of `replace`
PRIVATE = 0o700  # of a folder that is being written: no other user can put anything into it
PROBE = ".ttp-"  # the beginning of the names of short-lived files that show owner and rights
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ANEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# System calls that Python does not have.
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_RENAME_EXCHANGE = 2  # linux/fs.h
_FALLOC_KEEP_SIZE = 1  # linux/falloc.h
_AT_FDCWD = -100
_STATFS_BYTES = 256  # more than the structure has; the number of the file system stands first, in a long
_OWN_DISK = frozenset((0xEF53, 0x58465342))  # linux/magic.h: ext4 and xfs
_libc = ctypes.CDLL(None, use_errno=True)

_P = ParamSpec("_P")
_R = TypeVar("_R")


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


def one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let `function` raise CheckpointError in place of an OSError, or for a tree that is too deep to walk.

    The error names the function, unless its name is private.
    """
    doing = "" if function.__name__.startswith("_") else f" ({function.__name__})"

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            place = error.filename or args[0]
            raise CheckpointError(f"{place}: {error.strerror or error}{doing}") from error
        except RecursionError as error:
            raise CheckpointError(f"{args[0]}: folders are nested too deep{doing}") from error

    return guarded


def require_room(
    folder: Path, needed_bytes: int, need: str, source: str = "", error: type[Exception] = CheckpointError
) -> None:
    """Refuse a disk without room for a folder, which may be missing; raise `error` then.

    The message has the words of `need`, the number of bytes, and the words of `source`. Last words are
    tried without this check.
    """
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise error(
            f"{folder}: {free / 1e9:.3f} GB are free, {need} {needed_bytes / 1e9:.3f} GB{source}:"
            " make room, or name another folder"
        )


def is_wrong(error: OSError) -> bool:
    """Return True if a read error is a sign of damage; any other error says nothing about the file."""
    return error.errno in _WRONG


def files(folder: Path) -> Iterator[Path]:
    """Yield the path of every file below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            yield Path(place, name)


def is_folder(path: Path) -> bool:
    """Return True if `path` is a folder, or a link to a folder; False if the system cannot tell."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_same(first: Path, second: Path) -> bool:
    """Return True if both are the same folder; False if the system cannot tell."""
    try:
        return first == second or first.samefile(second)
    except (OSError, ValueError):
        return False


def free_name(root: Path, name: Callable[[int], str]) -> Path:
    """Return the first unused name in `root`, by number."""
    return next(path for number in count(1) if not os.path.lexists(path := root / name(number)))


def open_regular(path: Path) -> int:
    """Open a regular file, or a link to one, for reading; return its descriptor. Raises OSError."""
    # Checked before the open, because opening a device may act on it; and after, because the file may have
    # been replaced in between.
    _require_regular(path.stat(), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _require_regular(os.fstat(descriptor), path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(status: os.stat_result, path: Path) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read(path: Path, limit: int) -> bytes:
    """Return the content of a regular file. Raises OSError, also for more than `limit` bytes."""
    with os.fdopen(open_regular(path), "rb") as file:
        content = read_at_most(file, limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"Larger than {limit} bytes", str(path))
    return content


def read_at_most(file: io.BufferedIOBase, count: int) -> bytes:
    """Return the next `count` bytes of a file, fewer if it ends, without memory for more than it has."""
    pieces = []
    while count and (piece := file.read(min(count, _PIECE))):
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def create(folder: Path, name: str) -> int:
    """Make the file `name` below `folder` anew, and folders between, without links; return its descriptor."""
    *between, last = PurePosixPath(name).parts
    folder_descriptor = os.open(folder, _FOLDER)
    try:
        for part in between:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=folder_descriptor)
            inner = os.open(part, _FOLDER, dir_fd=folder_descriptor)
            os.close(folder_descriptor)
            folder_descriptor = inner
        try:
            return os.open(last, _ANEW, 0o666, dir_fd=folder_descriptor)
        except FileExistsError:
            os.unlink(last, dir_fd=folder_descriptor)
            return os.open(last, _ANEW, 0o666, dir_fd=folder_descriptor)
    except OSError as error:
        error.filename = str(folder / name)
        raise
    finally:
        os.close(folder_descriptor)


def open_below(folder: Path, name: str, flags: int) -> int:
    """Open the regular file `name` below `folder`, without links; return its descriptor. Raises OSError."""
    *between, last = PurePosixPath(name).parts
    folder_descriptor = os.open(folder, _FOLDER)
    try:
        for part in between:
            inner = os.open(part, _FOLDER, dir_fd=folder_descriptor)
            os.close(folder_descriptor)
            folder_descriptor = inner
        descriptor = os.open(
            last, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_descriptor
        )
    finally:
        os.close(folder_descriptor)
    try:
        _require_regular(os.fstat(descriptor), folder / name)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write(folder: Path, name: str, content: bytes) -> None:
    """Make a file `name` with this `content` in `folder`, on disk."""
    with os.fdopen(create(folder, name), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace(folder: Path, name: str, content: bytes, *, durable: bool = True) -> None:
    """Replace the file `name` in `folder` by a file with this `content`, atomically; `folder` may be a link.

    Without `durable` nothing is synced: readers get the old or the new file, a power cut may lose both.
    """
    draft = f"{name}.{secrets.token_hex(4)}{DRAFT}"
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.fdopen(os.open(draft, _ANEW, 0o666, dir_fd=folder_descriptor), "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.rename(draft, name, src_dir_fd=folder_descriptor, dst_dir_fd=folder_descriptor)
        if durable:
            os.fsync(folder_descriptor)
    except Exception as error:
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=folder_descriptor)
        if isinstance(error, OSError):
            error.filename = str(folder / name)
        raise
    finally:
        os.close(folder_descriptor)


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
    """fsync of a folder and of the folders below."""
    for place, _, _ in os.walk(folder, topdown=False):
        sync(Path(place))


def discard(folder: Path) -> None:
    """Remove a folder in which a process may be writing; its room is free at once, not after the writes."""
    for path in files(folder):
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC))
    remove(folder)


def remove(path: Path) -> None:
    """Remove a folder with its content, or the file or link of this name; nothing if missing."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(path.lstat().st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()


def make_private(folder: Path) -> None:
    """Make a folder into which only this user can put anything, until `share_folder`."""
    folder.mkdir(PRIVATE)


def ensure_private(folder: Path) -> None:
    """Make a folder as `make_private` does, unless a process of this user has. Raises CheckpointError."""
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
    """Return the owner of files that a process of `user` makes in `root`; tried once, not at each save."""
    return probe_rights(root).st_uid


def probe_rights(folder: Path) -> os.stat_result:
    """Return the status of a file that this process makes in `folder`: its owner and its rights.

    The user number does not tell: a server may give root another number, and no rights.
    """
    path = folder / f"{PROBE}{secrets.token_hex(4)}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        path.unlink()
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def name_user(number: int) -> str:
    """Return `number` and its name on this machine, for a person."""
    try:
        return f"user {number} ({pwd.getpwuid(number).pw_name})"
    except (KeyError, OSError):
        return f"user {number}"


def share_folder(folder: Path) -> None:
    """Give a private folder the rights that it would have had if made without `make_private`.

    An empty folder inside shows these rights: the folder above may give default rights (ACL), which the umask
    does not tell. After an error nothing changes: no checkpoint is lost for its rights.
    """
    with contextlib.suppress(OSError):
        sample = folder / f"{PROBE}rights"
        with contextlib.suppress(FileExistsError):  # left by a process that died here
            sample.mkdir(0o777)
        try:
            rights = sample.lstat().st_mode & 0o777
        finally:
            sample.rmdir()
        folder.chmod(stat.S_IMODE(folder.stat().st_mode) & ~0o777 | rights)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; return False if the system or its file system cannot. Raises OSError."""
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
    """Let the disk begin to write `count` bytes of a file from `begin`, without a wait; 0: to its end.

    This is a hint: a file system without support writes at the next sync, which also reports errors.
    """
    _libc.sync_file_range(descriptor, ctypes.c_int64(begin), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


def reserve(descriptor: int, count: int) -> None:
    """Let the file system find room for the first `count` bytes of a file at once; its size does not change.

    This is a hint: without support, or without room, each write finds room or reports an error.
    """
    _libc.fallocate(descriptor, _FALLOC_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(count))


def is_on_own_disk(descriptor: int) -> bool:
    """Return True if a file is on a file system (ext4, xfs) that only this kernel writes to."""
    status_buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(descriptor, status_buffer) != 0:
        return False
    return ctypes.c_long.from_buffer(status_buffer).value in _OWN_DISK
