"""Files and folders on a disk: complete and synced when a function returns, whatever somebody has put beside
them.

Anyone who may write to a save folder can put links, FIFOs, devices and folders there. To read, only regular
files are opened, and no open waits. To write, every file is made anew (O_EXCL) relative to a folder that is
open, and no link is followed: nobody can divert a write to another file of the job's owner.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path, PurePosixPath
from typing import ParamSpec, Protocol, TypeVar

from adaptor.errors import CheckpointError

_PIECE = 1 << 20  # bytes that are read in one go
DRAFT = ".tmp"  # ends the names of what `replace` writes first
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ANEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

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


def one_line(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let `function` raise CheckpointError where it met an OSError, or a tree that is too deep to walk.

    The line has its name, unless it is a private one, which tells a user nothing.
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


def is_wrong(error: OSError) -> bool:
    """Return whether an error in reading tells of damage; else it tells nothing about the file."""
    return error.errno in _WRONG


def files(folder: Path) -> Iterator[Path]:
    """Yield the path of every file below a folder."""
    for place, _, names in os.walk(folder):
        for name in names:
            yield Path(place, name)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder, or a link to one; False where nobody can say."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (OSError, ValueError):
        return False


def is_same(first: Path, second: Path) -> bool:
    """Return whether both are the same folder; False where nobody can say."""
    try:
        return first == second or first.samefile(second)
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
    """Open a regular file below a folder; return its descriptor.

    Args:
        folder: no link is followed below it, and it must not be one.
        name: of the file, with `/`.
        flags: of os.open, for reading or for writing.

    Raises:
        OSError: it is not there, or is no regular file.
    """
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


def replace(folder: Path, name: str, content: bytes) -> None:
    """Let `name` in `folder` become a file with this `content`, at once or not at all; it may be a link."""
    draft = f"{name}.{secrets.token_hex(4)}{DRAFT}"
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os.fdopen(os.open(draft, _ANEW, 0o666, dir_fd=folder_descriptor), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, name, src_dir_fd=folder_descriptor, dst_dir_fd=folder_descriptor)
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
