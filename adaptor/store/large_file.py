"""Cuts a large file of a checkpoint into parts, sends the parts, and goes on with an interrupted upload.

The file is always read from its beginning, for its checksum. A part is not sent again if the note of the
upload has the checksum of its content, and the store has the part with the etag of the note. The object is
made only after the whole file agrees with the manifest.

SAVE/.ttp_uploads/7f3a....jsonl notes an upload: its beginning in the first line, and a line for each part
that the store has accepted. The process that continues the upload may be on another node with the same
folder. A note is removed after its upload is completed or given up. A line that was cut short, or that two
processes wrote at the same time, is ignored: its part is sent again. If the folder cannot be written, the
upload goes on, and no other process can continue it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import xxhash

from adaptor import threads
from adaptor.checkpoint import disk, hashing, manifest
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store.catalog import UploadedPart
from adaptor.store.client import PIECE, Store
from adaptor.store.multipart import (
    LostUploadError,
    Multipart,
    RefusedError,
    SentPart,
    Upload,
    bare,
    joined,
    md5,
)
from adaptor.threads import AT_ONCE

# Another process may complete or remove the upload, but not again and again.
_ATTEMPTS = 3
_CHANGED = "has changed since its upload was begun"
_FORMAT = 1  # of a note
_SUFFIX = ".jsonl"
# The largest note that is read, in bytes; a note of 10,000 parts has 2 MB.
_LARGEST = 16 << 20
# The longest first line that is read; the name of an object has 1,024 bytes at most.
_LONGEST_LINE = 1 << 16


class _ChangedError(Exception):
    """The file has changed since the upload began; the text names the change."""


@dataclass
class LargeFile:
    """A file that is sent in parts.

    Attributes:
        root: the save folder
        manifest_place: the `place` of the manifest in the save folder
        path: of the file
        name: of the object
        file: the file's entry in the manifest
        pace: receives the number of bytes of each part before the part is sent, and 0 for a part in the store
        tell: prints a line about an upload that is begun again
    """

    store: Store
    multipart: Multipart
    root: Path
    manifest_place: str
    path: Path
    name: str
    file: FileEntry
    pace: Callable[[int], None]
    tell: Callable[[str], None]
    _noted: NotedUpload | None = None

    def send(self) -> UploadedPart:
        """Send the parts that the store lacks, and complete the object.

        Raises:
            CheckpointError: the file differs from the manifest; the upload is given up.
            StoreError: the store refuses, or does not answer; the next attempt goes on.
        """
        self._noted = find(self.root, self.store.identity, self.name)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._send()
            except LostUploadError:
                stored = self._completed_object()
                if stored is not None:
                    return stored
                if attempt == _ATTEMPTS:
                    raise
                reason = f"{self.store}/{self.name}: the store no longer has the upload that was begun"
            except _ChangedError as error:
                reason = f"{self.path}: {error}"
            self._give_up()
            self.tell(f"{reason}, so the file is sent from its beginning")
        raise AssertionError("the last attempt returns or raises")

    def _send(self) -> UploadedPart:
        stored_parts: dict[int, SentPart] | None = {}
        sizes = self.store.part_size(self.file.bytes), self.file.bytes
        if self._noted is None:
            upload = self.multipart.begin(self.name)
            noted = note(self.root, self.store.identity, self.manifest_place, upload, sizes)
            self._noted = noted
        else:
            noted = self._noted
            if noted.begun.bytes != self.file.bytes:
                raise _ChangedError(_CHANGED)
            if noted.begun.part != sizes[0]:
                raise _ChangedError("its upload was begun with parts of another size")
            try:
                stored_parts = self.multipart.parts(noted.upload)
            except RefusedError:
                stored_parts = None  # the store compares the etags of the note when the upload is completed
        digest = xxhash.xxh3_128()
        waiting: deque[Future[Arrived]] = deque()
        try:
            etags = self._send_parts(noted, stored_parts, digest, waiting)
            etag = self._complete(noted, etags)
        except manifest.UnreadableError:
            raise  # the disk may answer the next time
        except CheckpointError:
            wait(waiting)
            self._give_up()
            raise
        except (LostUploadError, _ChangedError):
            wait(waiting)
            raise
        # After other errors a request may still take minutes; its part is noted.
        noted.forget()
        return UploadedPart(self.file.path, self.file.bytes, digest.hexdigest(), etag)

    def _complete(self, noted: NotedUpload, etags: dict[int, str]) -> str:
        """Make the object; return its etag."""
        try:
            return self.multipart.complete(noted.upload, etags)
        except LostUploadError:
            # The object may be complete: the answer was lost, or another process has sent the same file.
            stored = self.store.stat(self.name)
            if (
                stored is None
                or stored.bytes != self.file.bytes
                or stored.etag != joined(etag for _, etag in sorted(etags.items()))
            ):
                raise
            return stored.etag

    def _completed_object(self) -> UploadedPart | None:
        """Return the object if the object's etag proves the parts of the file, else None.

        Another process has completed the upload then, or has died before the answer to the completion.
        """
        noted, stored = self._noted, self.store.stat(self.name)
        if noted is None or stored is None or stored.bytes != self.file.bytes:
            return None
        digest, etags = xxhash.xxh3_128(), {}
        pieces = compared(self.path, self.file, digest, noted.begun.part)
        for number, content in enumerate(pieces, 1):
            self.pace(0)
            etags[number] = md5(content)
        if stored.etag != joined(etag for _, etag in sorted(etags.items())):
            return None
        noted.forget()
        return UploadedPart(self.file.path, self.file.bytes, digest.hexdigest(), stored.etag)

    def _send_parts(
        self,
        noted: NotedUpload,
        stored_parts: dict[int, SentPart] | None,
        digest: xxhash.xxh3_128,
        waiting: deque[Future[Arrived]],
    ) -> dict[int, str]:
        """Send the missing parts; return the etags of all parts.

        Args:
            noted: the upload.
            stored_parts: the parts that the store lists; None if the store does not list them: the parts of
                the note.
            digest: of the whole file, at the end.
            waiting: receives the running requests.
        """
        etags: dict[int, str] = {}
        # The memory of the pieces is bounded; one more piece is being read.
        at_once = max(1, min(AT_ONCE, AT_ONCE * PIECE // noted.begun.part))

        def take() -> None:
            arrived_part = waiting.popleft().result()
            etags[arrived_part.number] = arrived_part.etag

        pieces = compared(self.path, self.file, digest, noted.begun.part)
        for number, content in enumerate(pieces, 1):
            checksum = xxhash.xxh3_128_hexdigest(content)
            noted_part = noted.parts.get(number)
            if noted_part is not None and noted_part.xxh3_128 != checksum:
                raise _ChangedError(_CHANGED)
            if noted_part is not None and (
                stored_parts is None or _is_there(stored_parts.get(number), noted_part, len(content))
            ):
                self.pace(0)
                etags[number] = noted_part.etag
                continue
            self.pace(len(content))
            if len(waiting) >= at_once:
                take()
            send = partial(self._send_part, noted, number, checksum, content)
            waiting.append(threads.begin(send, "ttp-part"))
        while waiting:
            take()
        return etags

    def _send_part(self, noted: NotedUpload, number: int, checksum: str, content: bytearray) -> Arrived:
        arrived_part = Arrived(number, checksum, self.multipart.send(noted.upload, number, content))
        noted.add(arrived_part)
        return arrived_part

    def _give_up(self) -> None:
        """Have the store forget the upload; a failure is one line, and the next step goes on."""
        noted, self._noted = self._noted, None
        if noted is not None:
            try:
                self.multipart.abort(noted.upload)
            except StoreError as error:
                self.tell(f"the parts of an upload that was cut short stay in the store: {error}")
            else:
                noted.forget()


def _is_there(sent_part: SentPart | None, noted_part: Arrived, size: int) -> bool:
    return sent_part is not None and sent_part.bytes == size and sent_part.etag == bare(noted_part.etag)


def compared(path: Path, file: FileEntry, digest: xxhash.xxh3_128, piece: int) -> Iterator[bytearray]:
    """Yield a file in pieces of `piece` bytes, the last one shorter, and add them to `digest`.

    Args:
        path: of the file.
        file: the file's entry in the manifest.
        digest: of the whole file, after the last piece.
        piece: bytes of each piece.

    Raises:
        CheckpointError: after the last piece, if the content differs from the manifest.
    """
    blocks = hashing.BlockDigest()
    for content in _read_pieces(path, file, piece):
        digest.update(content)
        if file.xxh3_128_blocks is not None:
            blocks.update(content)
        yield content
    is_equal = file.xxh3_128 in (None, digest.hexdigest())
    if not is_equal or file.xxh3_128_blocks not in (None, blocks.hexdigest()):
        raise CheckpointError(f"{path}: checksum differs from the manifest, so it is not sent")


def _read_pieces(path: Path, file: FileEntry, piece: int) -> Iterator[bytearray]:
    """Yield the pieces of a file, which must have the size of the manifest."""
    remaining = file.bytes
    try:
        with os.fdopen(disk.open_regular(path), "rb") as opened:
            content = bytearray(min(piece, remaining))
            while count := opened.readinto(content):
                del content[count:]
                remaining -= count
                yield content
                content = bytearray(min(piece, remaining))
            is_longer = bool(opened.read(1))
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else manifest.UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror or error})") from None
    if remaining or is_longer:
        raise CheckpointError(f"{path}: has another size than the {file.bytes} bytes of the manifest")


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
