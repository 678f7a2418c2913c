"""Brings the objects below a prefix of a store into a folder: the data of a job, before the job begins.

A file gets its name when all of its content is on the disk. A journal beside the files says from which object
each file was made, so an object that is unchanged, here and in the store, is not pulled again. Other content
of the folder is left alone.

Objects come in parts, a few at the same time, and are written in order. The size of each object is compared,
and all its parts have to be of one version. An etag that is an MD5 (S3, written in one request) is compared
with the content.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import msgspec
import xxhash

from adaptor import threads
from adaptor.checkpoint import disk
from adaptor.errors import StoreError
from adaptor.store.client import PIECE, DamagedError, Part, Store, Stored
from adaptor.store.multipart import bare
from adaptor.text import duration, size

TELL_S = 5.0  # between two lines about the progress, or about waiting

Tell = Callable[[str], None]
JOURNAL = ".ttp_pull.jsonl"
_LOCK = ".ttp_pull.lock"
_PART = ".ttp_part."
# Another user who may write to the folder cannot divert writes to another file of this user.
_CREATE_FLAGS = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# A part that another machine writes is no left-over; some file systems have locks of one machine only.
_LEFT_OVER_S = 3600.0
# flock has no time-out, so it is tried again as often as this.
_AGAIN_S = 0.2
# The file system has no locks, or this user may only read the folder, which then has to be complete.
_HAS_NO_LOCK = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_HAS_NO_LOCK |= {errno.EACCES, errno.EPERM, errno.EROFS, errno.EBADF}


def bring(
    pulls: Sequence[tuple[Store, Path]], tell: Tell, clock: Callable[[], float] = time.monotonic
) -> None:
    """Bring all objects of each store into its folder.

    Args:
        pulls: stores, and a folder for each; all folders differ.
        tell: prints a line.
        clock: the clock, in seconds.

    Raises:
        StoreError: a store does not answer or has no object, the disk refuses or is too small.
    """
    listed = {store: _objects(store) for store, _ in pulls}
    try:
        with contextlib.ExitStack() as stack:
            tasks: list[_Pull] = []
            # In the same order on all nodes: nodes that share two folders would wait for each other.
            for store, path in sorted(pulls, key=lambda entry: os.path.realpath(entry[1])):
                folder = DataFolder(path, str(store))
                waited = stack.enter_context(folder.locked(tell))
                objects = _objects(store) if waited else listed[store]
                tasks.append(_Pull(store, folder, objects, tell, clock))
            _require_room(tasks)
            for task in tasks:
                task.run()
    except OSError as error:
        named = error.filename or " or ".join(str(path) for _, path in pulls)
        raise StoreError(f"{named}: {error.strerror or error}") from None


def _objects(store: Store) -> dict[str, Stored]:
    """Return the objects that become files, by name.

    Raises:
        StoreError: the store has no object, or an object cannot become a file.
    """
    objects_by_name = {name: stored for name, stored in store.objects("").items() if not is_own(name)}
    folders = {str(parent) for name in objects_by_name for parent in PurePosixPath(name).parents}
    for name in sorted(objects_by_name.keys() & {*folders, ""}):
        if objects_by_name[name].bytes and name:
            raise StoreError(
                f"{store}: has an object {name} and others below {name}/, which cannot both be in a folder"
            )
        if not objects_by_name[name].bytes:
            # Consoles make an empty object for a folder; '' is the object of the prefix.
            del objects_by_name[name]
    if not objects_by_name:
        raise StoreError(f"{store}: there is no object below it")
    for name in objects_by_name:
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise StoreError(f"{store}: has an object {name!r}, which cannot be a file of a folder")
    return objects_by_name


def _require_room(tasks: Iterable[_Pull]) -> None:
    """Refuse disks without room for the missing objects; a replaced file stays until its end."""
    bytes_by_device: dict[int, int] = {}
    for task in tasks:
        device = task.folder.path.stat().st_dev
        bytes_by_device[device] = bytes_by_device.get(device, 0) + sum(
            stored.bytes for stored in task.missing.values()
        )
        source = f" have to come from {task.store}"
        disk.require_room(task.folder.path, bytes_by_device[device], "and", source, StoreError)


class _Pull:
    """Brings the missing ones of the objects of a store."""

    def __init__(
        self,
        store: Store,
        folder: DataFolder,
        objects: Mapping[str, Stored],
        tell: Tell,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.folder = folder
        self._objects = objects
        self.missing = folder.missing(objects)
        self._tell = tell
        self._clock = clock
        self._total = sum(stored.bytes for stored in self.missing.values())
        self._pulled_bytes = 0
        self._began = self._told_at = 0.0  # by the clock
        self._has_agreed = False  # an etag was the MD5 of the content
        self._compares = store.address.scheme in ("s3", "obs")
        self._differed: dict[str, str] = {}
        self._damaged: set[str] = set()

    def run(self) -> None:
        objects = self._objects
        self._began = self._told_at = self._clock()
        count = f"{len(objects)} object{'' if len(objects) == 1 else 's'}"
        summary = f"{count}, {size(sum(stored.bytes for stored in objects.values()))}"
        if not self.missing:
            self._tell(f"[ttp] {self.folder.path} has what is in {self.store} already ({summary})")
            return
        self._bring()
        seconds = max(self._clock() - self._began, 1e-3)
        self._tell(
            f"[ttp] {self.folder.path} has what is in {self.store} ({summary};"
            f" {size(self._total)} came in {duration(seconds)}, {size(int(self._total / seconds))}/s)"
        )

    def _bring(self) -> None:
        calls = (
            partial(self._unless_damaged, name, call)
            for name, stored in self.missing.items()
            for call in self._parts(name, stored)
        )
        # Closed after an error, when a request may still take minutes.
        with contextlib.closing(threads.in_order(calls, "ttp-pull")) as coming:
            for name, stored in self.missing.items():
                parts = islice(coming, -(-stored.bytes // PIECE))
                try:
                    self._write(name, stored, (part.result() for part in parts))
                except DamagedError as error:
                    self._damaged.add(name)
                    for part in parts:
                        part.exception()
                    self._write_again(name, error)

    def _unless_damaged(self, name: str, call: Callable[[], Part]) -> Part:
        """Make the request of a part, unless an earlier part of the object has changed."""
        if name in self._damaged:
            raise DamagedError(name)
        return call()

    def _parts(self, name: str, stored: Stored) -> Iterator[Callable[[], Part]]:
        for start in range(0, stored.bytes, PIECE):
            length = min(PIECE, stored.bytes - start)
            yield partial(self.store.get_part, name, start, length)

    def _write_again(self, name: str, error: DamagedError) -> None:
        """Request an object once more: a byte has changed on the way, or the object in the store."""
        stored = self.store.stat(name)
        if stored is None:
            raise error
        self._write(name, stored, (call() for call in self._parts(name, stored)))

    def _write(self, name: str, stored: Stored, parts: Iterator[Part]) -> None:
        """Write a file from the parts.

        Raises:
            DamagedError: the object was written again meanwhile, or differs from its etag.
        """
        digest = hashlib.md5(usedforsecurity=False)
        etag, count = None, 0
        try:
            with self.folder.file(name, stored) as file:
                for part in parts:
                    etag = part.etag if etag is None else etag
                    if (part.etag, part.size) != (etag, stored.bytes):
                        raise DamagedError(f"{self.store}/{name}: was changed while it was pulled")
                    if self._compares:
                        digest.update(part.content)
                    file.write(part.content)
                    count += len(part.content)
                    self._count(len(part.content))
                self._compare(name, etag or "", digest.hexdigest())
        except DamagedError:
            self._pulled_bytes -= count
            raise

    def _compare(self, name: str, etag: str, etag_of_content: str) -> None:
        """Compare content with an etag that is an MD5; in a store that encrypts, an etag may be no MD5."""
        if re.fullmatch("[0-9a-f]{32}", etag) is None or not self._compares:
            return
        if etag == etag_of_content:
            self._has_agreed = True
        elif not self._has_agreed and self._differed.get(name) == etag_of_content:
            self._compares = False
            self._tell(
                f"[ttp] {self.store}/{name}: the store sends the same content again, and the etag of the"
                " object is not its MD5, as in a store that encrypts: from here on only the sizes of objects"
                " are compared"
            )
        else:
            self._differed[name] = etag_of_content
            raise DamagedError(f"{self.store}/{name}: the content that came has another MD5 than its etag")

    def _count(self, count: int) -> None:
        self._pulled_bytes += count
        current_time = self._clock()
        if current_time - self._told_at < TELL_S:
            return
        self._told_at = current_time
        rate = self._pulled_bytes / max(current_time - self._began, 1e-3)
        remaining_s = (self._total - self._pulled_bytes) / rate
        self._tell(
            f"[ttp] {self.folder.path}: {size(self._pulled_bytes)} of {size(self._total)} have come from"
            f" {self.store} ({size(int(rate))}/s, {duration(remaining_s)} left)"
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
    """The folder for the objects of the URL `source`; `locked` makes it if it is missing."""

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        self._source = source
        self._has_lock = False
        self._locked_at = 0.0  # when the lock was taken, by the clock of the file system

    @contextlib.contextmanager
    def locked(self, tell: Tell) -> Iterator[bool]:
        """Hold the folder's lock, for which other nodes that share the folder wait.

        Without locks in the file system all nodes pull at the same time: more than needed, but correct.

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

    def _lock(self, descriptor: int, tell: Tell) -> bool:
        """Take the lock; return whether another process had the lock."""
        waited, reported_at = False, time.monotonic() - TELL_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                if time.monotonic() - reported_at >= TELL_S:
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

    def _is_present(self, line: _JournalLine | None, status: os.stat_result | None, stored: Stored) -> bool:
        if line is None or status is None or line.source != self._source:
            return False
        is_unchanged = (status.st_size, status.st_mtime_ns) == (line.bytes, line.mtime_ns)
        return is_unchanged and (line.bytes, bare(line.version)) == (stored.bytes, _version(stored))

    def _journal(self) -> dict[str, _JournalLine]:
        entries_by_name = {}
        with (
            contextlib.suppress(FileNotFoundError),
            os.fdopen(disk.open_regular(self.path / JOURNAL), "rb") as file,
        ):
            for line in file:
                # A line that was cut short means that its file is pulled again.
                with contextlib.suppress(msgspec.MsgspecError):
                    journal_line = msgspec.json.decode(line, type=_JournalLine)
                    entries_by_name[journal_line.name] = journal_line
        return entries_by_name

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
        if not self._has_lock or entry.name.startswith(f"{_PART}{_machine()}."):
            return self._has_lock
        with contextlib.suppress(FileNotFoundError):
            return self._locked_at - entry.stat(follow_symlinks=False).st_mtime >= _LEFT_OVER_S
        return False

    @contextlib.contextmanager
    def file(self, name: str, stored: Stored) -> Iterator[BinaryIO]:
        """Write the file `name` (with `/`), which gets its name, and the time of its object, after the block.

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
    return xxhash.xxh3_64_hexdigest(Path("/proc/sys/kernel/random/boot_id").read_bytes())


def _version(stored: Stored) -> str:
    """Return a value that changes when an object is written again."""
    return stored.etag or stored.modified.isoformat()
