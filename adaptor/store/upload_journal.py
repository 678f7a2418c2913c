"""The uncompleted uploads of large files, noted in the save folder beside the files.

SAVE/.ttp_uploads/7f3a....jsonl has the beginning of an upload in its first line, and a line for each part
that the store has accepted. The process that continues the upload sends the other parts; the process may be
on another node with the same folder. A note is removed after its upload is completed or given up.

A line that was cut short, or that two processes wrote at the same time, is ignored: its part is sent again.
If the folder cannot be written, the upload goes on, and no other process can continue it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import xxhash

from adaptor.checkpoint import disk
from adaptor.protocol import naming
from adaptor.store.multipart import Upload

_FORMAT = 1
_SUFFIX = ".jsonl"
# The largest note that is read, in bytes; a note of 10,000 parts has 2 MB.
_LARGEST = 16 << 20
# The longest first line that is read; the name of an object has 1,024 bytes at most.
_LONGEST_LINE = 1 << 16


class Begun(msgspec.Struct, frozen=True):
    """The first line of a note.

    Attributes:
        store: the identity of the store: its URL, and the endpoint if it has one
        name: of the object, below the URL
        seen: the `place` of the manifest in the save folder
        upload: the store's identifier of the upload
        part: bytes of each part except the last
        bytes: of the whole file
    """

    format: int
    store: str
    name: str
    seen: str
    upload: str
    part: int
    bytes: int


class Arrived(msgspec.Struct, frozen=True):
    """A part that the store has accepted: its number, from 1, the checksum of its content and its etag."""

    number: int
    xxh3_128: str
    etag: str


class NotedUpload:
    """An upload that was begun, and its note.

    Args:
        root: the save folder.
        begun_upload: the first line.
        arrived: the other lines.
    """

    def __init__(self, root: Path, begun_upload: Begun, arrived: Iterable[Arrived] = ()) -> None:
        self.begun = begun_upload
        self.parts = {arrived_part.number: arrived_part for arrived_part in arrived}
        self._root = root
        self._lock = threading.Lock()  # guards the fields below; parts arrive in several threads
        self._begins_line = True  # the last line of the note may have been cut short
        self._is_over = False

    @property
    def upload(self) -> Upload:
        """Return the upload for requests."""
        return Upload(self.begun.name, self.begun.upload)

    def add(self, arrived_part: Arrived) -> None:
        """Note a part that the store has accepted."""
        line = msgspec.json.encode(arrived_part) + b"\n"
        with self._lock, contextlib.suppress(OSError):
            if self._is_over:
                return
            name = _name(self.begun.store, self.begun.name)
            descriptor = disk.open_below(_real(self._root), name, os.O_RDWR | os.O_APPEND)
            try:
                if not self._is_ours(descriptor):
                    return
                os.write(descriptor, b"\n" + line if self._begins_line else line)
                self._begins_line = False
            finally:
                os.close(descriptor)

    def forget(self) -> None:
        """Remove the note: the upload is completed, or the store has forgotten it."""
        with self._lock, contextlib.suppress(OSError):
            self._is_over = True
            name = _name(self.begun.store, self.begun.name)
            descriptor = disk.open_below(_real(self._root), name, os.O_RDONLY)
            try:
                if not self._is_ours(descriptor):
                    return
            finally:
                os.close(descriptor)
            (self._root / name).unlink()
            (self._root / naming.UPLOADS).rmdir()  # fails if the folder has other notes

    def _is_ours(self, descriptor: int) -> bool:
        """Return whether a note is of this upload; another process may have begun an upload of the same
        object.
        """
        first, _, _ = os.pread(descriptor, _LONGEST_LINE, 0).partition(b"\n")
        try:
            return msgspec.json.decode(first, type=Begun).upload == self.begun.upload
        except msgspec.MsgspecError:
            return True  # the note was cut short, so no process reads it


def note(root: Path, store: str, manifest_place: str, upload: Upload, sizes: tuple[int, int]) -> NotedUpload:
    """Note the beginning of an upload.

    Args:
        root: the save folder.
        store: its identity.
        manifest_place: the `place` of the manifest in the save folder.
        upload: the upload.
        sizes: bytes of a part, and of the whole file.
    """
    begun_upload = Begun(_FORMAT, store, upload.name, manifest_place, upload.mark, *sizes)
    with contextlib.suppress(OSError):
        disk.write(_real(root), _name(store, upload.name), msgspec.json.encode(begun_upload) + b"\n")
    return NotedUpload(root, begun_upload)


def find(root: Path, store: str, name: str) -> NotedUpload | None:
    """Return the noted upload of an object; None without a note.

    Args:
        root: the save folder.
        store: its identity.
        name: of the object.
    """
    noted_upload = _read(root, root / _name(store, name))
    return (
        noted_upload
        if noted_upload is not None and (noted_upload.begun.store, noted_upload.begun.name) == (store, name)
        else None
    )


def all_of(root: Path, store: str) -> Iterator[NotedUpload]:
    """Yield the uploads to a store, by its identity, that a save folder notes."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted((root / naming.UPLOADS).iterdir())
    for path in paths:
        noted_upload = _read(root, path) if path.suffix == _SUFFIX else None
        if noted_upload is not None and noted_upload.begun.store == store:
            yield noted_upload


def _read(root: Path, path: Path) -> NotedUpload | None:
    try:
        first, *part_lines = disk.read(path, _LARGEST).splitlines() or [b""]
        begun_upload = msgspec.json.decode(first, type=Begun)
    except (OSError, msgspec.MsgspecError):
        return None
    arrived = []
    for line in part_lines:
        with contextlib.suppress(msgspec.MsgspecError):
            arrived.append(msgspec.json.decode(line, type=Arrived))
    return (
        NotedUpload(root, begun_upload, arrived)
        if begun_upload.format == _FORMAT and begun_upload.part > 0
        else None
    )


def _name(store: str, name: str) -> str:
    return f"{naming.UPLOADS}/{xxhash.xxh3_64_hexdigest(f'{store}/{name}'.encode())}{_SUFFIX}"


def _real(root: Path) -> Path:
    """Return the save folder itself, if the user names a link to it."""
    return Path(os.path.realpath(root))
