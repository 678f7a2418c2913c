"""Sends a large file of a checkpoint in parts, and goes on with an interrupted upload.

The file is always read from its beginning, for its checksum. A part is not sent again if the note of the
upload (`upload_journal.py`) has the checksum of its content, and the store has the part with the etag of the
note. The object is made only after the whole file agrees with the manifest.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path

import xxhash

from adaptor.checkpoint import disk, hashing, manifest
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol.naming import FileEntry
from adaptor.store import store_requests, upload_journal
from adaptor.store.client import PIECE, Store
from adaptor.store.layout import UploadedPart
from adaptor.store.multipart import LostUploadError, Multipart, RefusedError, SentPart, bare, joined, md5
from adaptor.store.store_requests import AT_ONCE
from adaptor.store.upload_journal import Arrived, NotedUpload

# Another process may complete or remove the upload, but not again and again.
_ATTEMPTS = 3
_CHANGED = "has changed since its upload was begun"


class _ChangedError(Exception):
    """The file has changed since the upload began; the text names the change."""


class LargeFile:
    """A file that is sent in parts.

    Args:
        store: the target.
        multipart: the requests for uploads of several parts.
        root: the save folder.
        manifest_place: the `place` of the manifest in the save folder.
        path: of the file.
        name: of the object.
        file: the file's entry in the manifest.
        pace: receives the number of bytes of each part before the part is sent, and 0 for a part in the
            store.
        tell: prints a line about an upload that is begun again.
    """

    def __init__(
        self,
        store: Store,
        multipart: Multipart,
        root: Path,
        manifest_place: str,
        path: Path,
        name: str,
        file: FileEntry,
        pace: Callable[[int], None],
        tell: Callable[[str], None],
    ) -> None:
        self._store = store
        self._multipart = multipart
        self._root = root
        self._manifest_place = manifest_place
        self._path = path
        self._name = name
        self._file = file
        self._pace = pace
        self._tell = tell
        self._noted: NotedUpload | None = None

    def send(self) -> UploadedPart:
        """Send the parts that the store lacks, and complete the object.

        Raises:
            CheckpointError: the file differs from the manifest; the upload is given up.
            StoreError: the store refuses, or does not answer; the next attempt goes on.
        """
        self._noted = upload_journal.find(self._root, self._store.identity, self._name)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return self._send()
            except LostUploadError:
                stored = self._completed_object()
                if stored is not None:
                    return stored
                if attempt == _ATTEMPTS:
                    raise
                reason = f"{self._store}/{self._name}: the store no longer has the upload that was begun"
            except _ChangedError as error:
                reason = f"{self._path}: {error}"
            self._give_up()
            self._tell(f"{reason}, so the file is sent from its beginning")
        raise AssertionError("the last attempt returns or raises")

    def _send(self) -> UploadedPart:
        stored_parts: dict[int, SentPart] | None = {}
        sizes = self._store.part_size(self._file.bytes), self._file.bytes
        if self._noted is None:
            upload = self._multipart.begin(self._name)
            noted = upload_journal.note(self._root, self._store.identity, self._manifest_place, upload, sizes)
            self._noted = noted
        else:
            noted = self._noted
            if noted.begun.bytes != self._file.bytes:
                raise _ChangedError(_CHANGED)
            if noted.begun.part != sizes[0]:
                raise _ChangedError("its upload was begun with parts of another size")
            try:
                stored_parts = self._multipart.parts(noted.upload)
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
        return UploadedPart(self._file.path, self._file.bytes, digest.hexdigest(), etag)

    def _complete(self, noted: NotedUpload, etags: dict[int, str]) -> str:
        """Make the object; return its etag."""
        try:
            return self._multipart.complete(noted.upload, etags)
        except LostUploadError:
            # The object may be complete: the answer was lost, or another process has sent the same file.
            stored = self._store.stat(self._name)
            if (
                stored is None
                or stored.bytes != self._file.bytes
                or stored.etag != joined(etag for _, etag in sorted(etags.items()))
            ):
                raise
            return stored.etag

    def _completed_object(self) -> UploadedPart | None:
        """Return the object if its etag proves that it has the parts of this file, else None.

        Another process has completed the upload then, or has died before it heard of the completion.
        """
        noted, stored = self._noted, self._store.stat(self._name)
        if noted is None or stored is None or stored.bytes != self._file.bytes:
            return None
        digest, etags = xxhash.xxh3_128(), {}
        pieces = compared(self._path, self._file, digest, noted.begun.part)
        for number, content in enumerate(pieces, 1):
            self._pace(0)
            etags[number] = md5(content)
        if stored.etag != joined(etag for _, etag in sorted(etags.items())):
            return None
        noted.forget()
        return UploadedPart(self._file.path, self._file.bytes, digest.hexdigest(), stored.etag)

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

        pieces = compared(self._path, self._file, digest, noted.begun.part)
        for number, content in enumerate(pieces, 1):
            checksum = xxhash.xxh3_128_hexdigest(content)
            noted_part = noted.parts.get(number)
            if noted_part is not None and noted_part.xxh3_128 != checksum:
                raise _ChangedError(_CHANGED)
            if noted_part is not None and (
                stored_parts is None or _is_there(stored_parts.get(number), noted_part, len(content))
            ):
                self._pace(0)
                etags[number] = noted_part.etag
                continue
            self._pace(len(content))
            if len(waiting) >= at_once:
                take()
            send = partial(self._send_part, noted, number, checksum, content)
            waiting.append(store_requests.begin(send, "ttp-part"))
        while waiting:
            take()
        return etags

    def _send_part(self, noted: NotedUpload, number: int, checksum: str, content: bytearray) -> Arrived:
        arrived_part = Arrived(number, checksum, self._multipart.send(noted.upload, number, content))
        noted.add(arrived_part)
        return arrived_part

    def _give_up(self) -> None:
        """Have the store forget the upload; a failure is one line, and the next step goes on."""
        noted, self._noted = self._noted, None
        if noted is not None:
            try:
                self._multipart.abort(noted.upload)
            except StoreError as error:
                self._tell(f"the parts of an upload that was cut short stay in the store: {error}")
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
    for content in _read(path, file, piece):
        digest.update(content)
        if file.xxh3_128_blocks is not None:
            blocks.update(content)
        yield content
    is_equal = file.xxh3_128 in (None, digest.hexdigest())
    if not is_equal or file.xxh3_128_blocks not in (None, blocks.hexdigest()):
        raise CheckpointError(f"{path}: checksum differs from the manifest, so it is not sent")


def _read(path: Path, file: FileEntry, piece: int) -> Iterator[bytearray]:
    """Yield the pieces of a file, which must have the size of the manifest."""
    remaining = file.bytes
    try:
        with io.FileIO(disk.open_regular(path)) as opened:
            while content := _filled(opened, min(piece, remaining)):
                remaining -= len(content)
                yield content
            is_longer = bool(opened.read(1))
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else manifest.UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror or error})") from None
    if remaining or is_longer:
        raise CheckpointError(f"{path}: has another size than the {file.bytes} bytes of the manifest")


def _filled(opened: io.FileIO, count: int) -> bytearray:
    """Return `count` bytes, fewer at the end of the file."""
    piece = bytearray(count)
    view, filled = memoryview(piece), 0
    while filled < count and (count_read := opened.readinto(view[filled:])):
        filled += count_read
    view.release()
    del piece[filled:]
    return piece
