"""Writes a complete checkpoint of a save folder into a store.

Files first, then this node's part list, and the manifest last. A process that dies in between leaves objects
that count as no checkpoint; the next push of the same checkpoint continues. Several nodes that send a
checkpoint together: `joint.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from adaptor.checkpoint import manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store import catalog, large_file, local_checkpoints, prune
from adaptor.store.catalog import UploadedPart
from adaptor.store.client import PIECE, DamagedError, Store, Stored
from adaptor.store.large_file import LargeFile
from adaptor.store.multipart import joined, md5


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    Attributes:
        where: the prefix of the checkpoint
        sent: bytes that were written now; the others were in the store already
        there: the whole checkpoint was in the store already
    """

    where: str
    files: int
    bytes: int
    sent: int
    there: bool


def read_folder(root: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint in a save folder.

    Raises:
        CheckpointError: the manifest is missing, or names another step or no file.
    """
    folder = root / naming.final_name(step)
    saved_manifest = manifest.read(folder)
    if saved_manifest.step != step or not saved_manifest.files:
        raise CheckpointError(
            f"{folder / naming.MANIFEST}: is not the manifest of a checkpoint of step {step}"
        )
    return saved_manifest


def push(
    store: Store,
    root: Path,
    step: int,
    pace: Callable[[int], None] = lambda count: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Pushed:
    """Write the checkpoint of `step` in the save folder `root` to the store, and commit it.

    Args:
        store: the target.
        root: the save folder.
        step: of the checkpoint.
        pace: receives the number of bytes of each piece before the piece is sent, and 0 for a piece in the
            store.
        tell: prints a line about an upload that is begun again or cannot be removed.

    Raises:
        CheckpointError: the checkpoint is incomplete or differs from its manifest; nothing is committed.
    """
    saved_manifest = read_folder(root, step)
    total = sum(file.bytes for file in saved_manifest.files)
    stored_prefix = find(store, saved_manifest)
    if stored_prefix is not None:
        prune.remove_left_over(store, root, stored_prefix, tell)
        return Pushed(stored_prefix, len(saved_manifest.files), total, 0, True)
    prefix = catalog.place(saved_manifest)
    folder = root / naming.final_name(step)
    if saved_manifest.part:
        raise CheckpointError(
            f"{folder}: has only what the ranks of one node have saved on its own disk, so it is not sent"
            " alone"
        )
    local_checkpoints.require(folder, (file.path for file in saved_manifest.files))
    sending = Sending(store, root, saved_manifest, prefix, pace, print_line=tell)
    sending.send(saved_manifest.files)
    sending.tell(is_complete=True)
    require_same(root, saved_manifest)
    commit(store, saved_manifest)
    prune.remove_left_over(store, root, prefix, tell)
    return Pushed(prefix, len(saved_manifest.files), total, sending.sent, False)


def require_same(root: Path, saved_manifest: Manifest) -> None:
    """Refuse to commit a checkpoint that the save folder no longer has. Raises CheckpointError."""
    if catalog.place(read_folder(root, saved_manifest.step)) != catalog.place(saved_manifest):
        folder = root / naming.final_name(saved_manifest.step)
        raise CheckpointError(f"{folder}: was saved anew while it was sent, so nothing is completed")


def find(store: Store, saved_manifest: Manifest) -> str | None:
    """Return the prefix of a complete copy of a checkpoint, None without a copy.

    A pulled checkpoint has another manifest than the pushed checkpoint, and the same files of the same
    generation.
    """
    for prefix in catalog.places(store, saved_manifest.step)[0]:
        if not catalog.is_of_same_generation(prefix, catalog.place(saved_manifest)):
            continue
        try:
            checkpoint = catalog.examine(store, prefix)
        except DamagedError:
            continue  # it is written anew
        stored_files, files = checkpoint.saved_manifest.files, saved_manifest.files
        if prefix == catalog.place(saved_manifest) or (
            len(stored_files) == len(files) and manifest.may_have(stored_files, files)
        ):
            return prefix
    return None


@dataclass
class Sending:
    """Writes files of a checkpoint, and this node's part list.

    An object of an interrupted push is not sent again; its file is read from the disk for the checksum. Large
    files: `large_file.py`.

    Attributes:
        root: the save folder
        saved_manifest: the manifest in the save folder
        prefix: of the objects
        pace: receives the number of bytes of each piece before the piece is sent, and 0 for a piece in the
            store
        node: the number of this node
        print_line: prints a line about an upload that is begun again
        sent: number of sent bytes
        pieces: number of pieces that were read: a sign of life
    """

    store: Store
    root: Path
    saved_manifest: Manifest
    prefix: str
    pace: Callable[[int], None]
    node: int = 0
    print_line: Callable[[str], None] = lambda line: None
    sent: int = 0
    pieces: int = 0

    def __post_init__(self) -> None:
        self._folder = self.root / naming.final_name(self.saved_manifest.step)
        self._manifest_place = catalog.place(self.saved_manifest)
        self._parts: dict[str, UploadedPart] = {}
        self._lock = threading.Lock()  # guards the list, which a second thread writes, too
        # Read before this node writes a list.
        self._stored = self.store.objects(self.prefix)
        try:
            self._listed_parts = catalog.read_parts(self.store, self.prefix, self._stored)
        except DamagedError:
            self._listed_parts = {}  # the files are written again

    def send(self, files: Iterable[FileEntry]) -> None:
        """Write the files that the store lacks.

        Raises:
            CheckpointError: a file differs from the manifest.
        """
        for file in files:
            name = f"{self.prefix}/{file.path}"
            stored, part = self._stored.get(name), self._listed_parts.get(file.path)
            uploaded_part = None
            if stored is not None and self._may_be(file, stored, part):
                uploaded_part = self._hashed(file, name, stored, part)
            if uploaded_part is None:
                uploaded_part = self._send(file, name)
            self._parts[file.path] = uploaded_part

    def _send(self, file: FileEntry, name: str) -> UploadedPart:
        """Write a file as the object `name`."""
        store, path = self.store, self._folder / file.path
        if file.bytes > store.piece and store.multipart is not None:
            return LargeFile(
                store,
                store.multipart,
                self.root,
                self._manifest_place,
                path,
                name,
                file,
                self._count,
                self.print_line,
            ).send()
        digest = xxhash.xxh3_128()

        def pieces() -> Iterator[bytearray]:
            # The comparison ends before the last request of the upload, so no object has wrong content.
            for piece in large_file.compared(path, file, digest, PIECE):
                self._count(len(piece))
                yield piece

        if file.bytes > store.piece:
            etag = store.put_pieces(name, pieces(), file.bytes)
        else:
            etag = store.put(name, b"".join(pieces()))
        return UploadedPart(file.path, file.bytes, digest.hexdigest(), etag)

    def _may_be(self, file: FileEntry, stored: Stored, part: UploadedPart | None) -> bool:
        """Return whether the stored object may be this file."""
        if part is None:
            # The objects may be of another node's manifest.
            return stored.bytes == file.bytes and self._manifest_place == self.prefix
        return stored.bytes == file.bytes and part.etag == stored.etag

    def _hashed(
        self, file: FileEntry, name: str, stored: Stored, part: UploadedPart | None
    ) -> UploadedPart | None:
        """Return the part of a stored file, by the content on the disk; None if the object has other content.

        A file without a checksum in the manifest may have changed since its upload. Without an entry in a
        list the etag decides, if it is made as in most stores with the interface of S3, or the object is
        read.
        """
        digest, etags = xxhash.xxh3_128(), []
        size = self.store.part_size(file.bytes)
        for content in large_file.compared(self._folder / file.path, file, digest, size):
            self._count(0)
            if part is None:
                etags.append(md5(content))
        uploaded_part = UploadedPart(file.path, file.bytes, digest.hexdigest(), stored.etag)
        if part is not None:
            return uploaded_part if part.xxh3_128 == uploaded_part.xxh3_128 else None
        if file.xxh3_128 is not None:
            return uploaded_part
        etag = joined(etags) if file.bytes > self.store.piece else "".join(etags)
        if stored.etag == etag:
            return uploaded_part
        return (
            uploaded_part
            if catalog.hash_object(self.store, name, file.bytes) == uploaded_part.xxh3_128
            else None
        )

    def look_again(self) -> None:
        """Read the objects that other nodes have sent since the last look."""
        self._stored = self.store.objects(self.prefix)

    def tell(self, *, is_complete: bool) -> None:
        """Write the list; `is_complete`: this node has sent its part."""
        with self._lock:
            content = catalog.encode_parts(
                self.node,
                list(self._parts.values()),
                self._manifest_place,
                is_complete=is_complete,
                sent=self.sent,
            )
            self.store.put(catalog.parts_name(self.prefix, self.node), content)

    def _count(self, count: int) -> None:
        self.pace(count)
        self.sent += count
        self.pieces += 1


def commit(store: Store, saved_manifest: Manifest) -> int:
    """Write the manifest, if the part lists name all files and the store has them; return their bytes.

    Args:
        store: the store.
        saved_manifest: of the node that commits. Files of nodes with their own disks are added to it.

    Raises:
        CheckpointError: two nodes have different files of one name.
        DamagedError: a file is missing.
    """
    prefix = catalog.place(saved_manifest)
    stored_objects = store.objects(prefix)
    lists = catalog.read_lists(store, prefix, stored_objects)
    parts = catalog.parts_of(lists, prefix, stored_objects)
    sizes_by_path = {file.path: file.bytes for file in saved_manifest.files}
    contents = {file.path: {file.xxh3_128} for file in saved_manifest.files if file.xxh3_128 is not None}
    for part_list in lists.values():
        for part in part_list.files:
            contents.setdefault(part.path, set()).add(part.xxh3_128)
            if part_list.seen not in ("", prefix):
                sizes_by_path.setdefault(part.path, part.bytes)
    for path in sizes_by_path:
        if len(contents.get(path, ())) > 1:
            raise CheckpointError(f"{store}/{prefix}/{path}: two nodes have different files of this name")
    entries = []
    for path, size in sorted(sizes_by_path.items()):
        sent, stored = parts.get(path), stored_objects.get(f"{prefix}/{path}")
        if sent is None or stored is None or stored.bytes != size:
            raise DamagedError(
                f"{store}/{prefix}/{path}: is missing after the upload, so nothing is completed"
            )
        entries.append(FileEntry(path, size, sent.xxh3_128))
    store.put(catalog.manifest_name(prefix), replace(saved_manifest, files=tuple(entries)).encode())
    return sum(sizes_by_path.values())
