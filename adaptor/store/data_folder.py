"""A local folder into which objects of a store are pulled: its present files, and its lock.

A file gets its name when all of its content is on the disk. A journal beside the files says from which object
each file was made, so an object that is unchanged, here and in the store, is not pulled again. Other content
of the folder is left alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec
import xxhash

from adaptor.checkpoint import disk
from adaptor.errors import StoreError
from adaptor.store.client import Stored
from adaptor.store.multipart import bare

JOURNAL = ".ttp_pull.jsonl"
_LOCK = ".ttp_pull.lock"
_PART = ".ttp_part."
# Another user who may write to the folder cannot divert writes to another file of this user.
_CREATE_FLAGS = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# A part that another machine is writing is no left-over, and some file systems have locks of one machine
# only.
_LEFT_OVER_S = 3600.0
# flock has no time-out, so it is tried again as often as this.
_AGAIN_S = 0.2
# Between two lines about waiting.
_TELL_S = 10.0
# The file system has no locks, or this user may only read the folder, which then has to be complete.
_HAS_NO_LOCK = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EINVAL,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.EBADF,
)


class _JournalLine(msgspec.Struct, frozen=True):
    """A line of the journal: a file, and the object from which the file was made."""

    source: str
    name: str
    bytes: int
    version: str  # earlier versions noted an etag with its quotes
    mtime_ns: int


def is_own(name: str) -> bool:
    """Return whether an object has the name of a file that pulls write: a user has copied the folder."""
    last = name.rpartition("/")[2]
    return last in (JOURNAL, _LOCK) or last.startswith(_PART)


class DataFolder:
    """The folder; `locked` makes it if it is missing.

    Args:
        path: of the folder.
        source: the URL of the objects.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self._source = source
        self._has_lock = False
        self._locked_at = 0.0  # when the lock was taken, by the clock of the file system

    @contextlib.contextmanager
    def locked(self, tell: Callable[[str], None]) -> Iterator[bool]:
        """Hold the folder's lock, for which other nodes that share the folder wait; the lock ends with the
        process.

        Without locks in the file system all nodes pull at the same time: more than needed, but correct.

        Args:
            tell: prints a line.

        Yields:
            Whether another process has had the lock meanwhile.

        Raises:
            StoreError: the path is no folder.
            OSError: the folder cannot be made, or the lock cannot be taken.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise StoreError(f"{self.path}: is not a folder") from None
        descriptor = None
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDWR | _CREATE_FLAGS, 0o666)
            waited = self._lock(descriptor, tell)
            os.utime(descriptor)
            self._locked_at = os.fstat(descriptor).st_mtime
            self._has_lock = True
        except OSError as error:
            if error.errno not in _HAS_NO_LOCK:
                raise
            waited = False
        try:
            yield waited
        finally:
            self._has_lock = False
            if descriptor is not None:
                os.close(descriptor)

    def _lock(self, descriptor: int, tell: Callable[[str], None]) -> bool:
        """Take the lock; return whether another process had the lock."""
        waited, reported_at = False, time.monotonic() - _TELL_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                if time.monotonic() - reported_at >= _TELL_S:
                    reported_at = time.monotonic()
                    tell(f"[ttp] waiting for another ttprun, which pulls to {self.path}")
                time.sleep(_AGAIN_S)
            else:
                return waited

    def missing(self, objects: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return the objects that are not in the folder, or that differ from the journal.

        Raises:
            StoreError: an object cannot become a file here.
            OSError: the folder cannot be read.
        """
        longest = os.pathconf(self.path, "PC_NAME_MAX")
        for name in objects:
            if any(len(part.encode()) > longest for part in name.split("/")):
                raise StoreError(
                    f"{self._source}: has an object {name}, and {self.path} takes names of {longest} bytes"
                )
        journal = self._journal()
        # Each folder is opened and read: on a network file system `stat` may answer from its cache about a
        # file that another node has just written.
        existing: dict[str, os.stat_result] = {}
        for folder in {str(PurePosixPath(name).parent) for name in objects}:
            existing.update(self._scan(folder, objects))
        return {
            name: stored
            for name, stored in objects.items()
            if not self._is_present(journal.get(name), existing.get(name), stored)
        }

    def _is_present(
        self, journal_line: _JournalLine | None, status: os.stat_result | None, stored: Stored
    ) -> bool:
        if journal_line is None or status is None or journal_line.source != self._source:
            return False
        unchanged = (status.st_size, status.st_mtime_ns) == (journal_line.bytes, journal_line.mtime_ns)
        return unchanged and (journal_line.bytes, bare(journal_line.version)) == (
            stored.bytes,
            _version(stored),
        )

    def _journal(self) -> dict[str, _JournalLine]:
        entries_by_name = {}
        with contextlib.suppress(FileNotFoundError), self._open_journal() as file:
            for line in file:
                # A line that was cut short means that its file is pulled again.
                with contextlib.suppress(msgspec.MsgspecError):
                    journal_line = msgspec.json.decode(line, type=_JournalLine)
                    entries_by_name[journal_line.name] = journal_line
        return entries_by_name

    def _open_journal(self) -> BinaryIO:
        return os.fdopen(disk.open_regular(self.path / JOURNAL), "rb")

    def _scan(self, folder: str, objects: Mapping[str, Stored]) -> Iterator[tuple[str, os.stat_result]]:
        """Yield the files of a folder, by their names below `path`; remove the left-over parts of dead pulls.

        Raises:
            StoreError: a folder has the name of an object, or a file has the name of a folder.
        """
        try:
            entries = os.scandir(self.path / folder)
        except FileNotFoundError:
            return
        except NotADirectoryError:
            raise StoreError(
                f"{self.path / folder}: cannot be a folder, because a file is there, and {self._source} has"
                f" objects below {folder}/"
            ) from None
        with entries, contextlib.suppress(FileNotFoundError):  # without locks others remove files meanwhile
            for entry in entries:
                name = str(PurePosixPath(folder, entry.name))
                if entry.name.startswith(_PART):
                    if self._is_left_over(entry):
                        Path(entry.path).unlink(missing_ok=True)
                elif entry.is_dir(follow_symlinks=False) and name in objects:
                    raise StoreError(
                        f"{self.path / name}: is a folder, and {self._source} has an object of that name"
                    )
                elif entry.is_file():
                    yield name, entry.stat()

    def _is_left_over(self, entry: os.DirEntry[str]) -> bool:
        """Return whether no process writes this file any more."""
        if not self._has_lock:
            return False
        if entry.name.startswith(f"{_PART}{_machine()}."):
            return True
        with contextlib.suppress(FileNotFoundError):
            return self._locked_at - entry.stat(follow_symlinks=False).st_mtime >= _LEFT_OVER_S
        return False

    @contextlib.contextmanager
    def file(self, name: str, stored: Stored) -> Iterator[BinaryIO]:
        """Write the file `name`, which gets its name at the end of the block.

        Args:
            name: with `/`.
            stored: the object, whose time the file gets.

        Raises:
            StoreError: the file has another number of bytes than the object.
            OSError: the disk refuses.
        """
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.parent / f"{_PART}{_machine()}.{secrets.token_hex(8)}"
        try:
            with part.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            seconds = int(stored.modified.timestamp())
            os.utime(part, (seconds, seconds))
            status = part.stat()
            if status.st_size != stored.bytes:
                raise StoreError(f"{target}: has {status.st_size} bytes, the object has {stored.bytes}")
            part.rename(target)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        line = _JournalLine(self._source, name, status.st_size, _version(stored), status.st_mtime_ns)
        self._note(msgspec.json.encode(line) + b"\n")

    def _note(self, line: bytes) -> None:
        """Append a line to the journal by a single write: without locks several processes append."""
        descriptor = os.open(self.path / JOURNAL, os.O_WRONLY | os.O_APPEND | _CREATE_FLAGS, 0o666)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)


@functools.cache
def _machine() -> str:
    """Return an identity of this machine, which changes when the machine is restarted."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return xxhash.xxh3_64_hexdigest(text.encode())


def _version(stored: Stored) -> str:
    """Return a value that changes when an object is written again."""
    return stored.etag or stored.modified.isoformat()
