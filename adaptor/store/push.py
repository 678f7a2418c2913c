"""Writes a complete checkpoint of a save folder into a store.

Files first, then the list of this node's parts, and the manifest last. Who dies in between leaves objects
that nobody takes for a checkpoint; the next push of the same checkpoint goes on after them. Several nodes
that send one together: `joint.py`.
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
from adaptor.protocol.file_entry import FileEntry
from adaptor.store import abandoned, choose, file_pieces, layout, whole
from adaptor.store.client import PIECE, DamagedError, Store, Stored
from adaptor.store.etags import joined, md5
from adaptor.store.large_file import LargeFile
from adaptor.store.layout import UploadedPart


@dataclass(frozen=True)
class Pushed:
    """The result of a push.

    Attributes:
        sent: bytes that were written now; the others were there already
        there: whether the whole checkpoint was
    """

    where: str
    files: int
    bytes: int
    sent: int
    there: bool


def read_folder(root: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint in a save folder.

    Raises:
        CheckpointError: there is none, or it names another step or no file.
    """
    folder = root / naming.final_name(step)
    known = manifest.read(folder)
    if known.step != step or not known.files:
        raise CheckpointError(
            f"{folder / naming.MANIFEST}: is not the manifest of a checkpoint of step {step}"
        )
    return known


def push(
    store: Store,
    root: Path,
    step: int,
    pace: Callable[[int], None] = lambda count: None,
    tell: Callable[[str], None] = lambda line: None,
) -> Pushed:
    """Write the checkpoint of `step` in the save folder `root` to the store, and commit it.

    Args:
        pace: is called with the bytes of each piece before it is sent, and with 0 for one that is there.
        tell: says that an upload is begun anew, or cannot be removed.

    Raises:
        CheckpointError: the checkpoint is not complete, or not what its manifest says; nothing is committed.
        StoreError: the store refuses, or does not answer.
    """
    known = read_folder(root, step)
    total = sum(file.bytes for file in known.files)
    there = find(store, known)
    if there is not None:
        abandoned.remove_left_over(store, root, there, tell)
        return Pushed(there, len(known.files), total, 0, True)
    where = layout.place(known)
    folder = root / naming.final_name(step)
    if known.part:
        raise CheckpointError(
            f"{folder}: has only what the ranks of one node have saved on its own disk, so it is not sent"
            " alone"
        )
    whole.require(folder, (file.path for file in known.files))
    sending = Sending(store, root, known, where, pace, tell=tell)
    sending.send(known.files)
    sending.tell(done=True)
    require_same(root, known)
    commit(store, known)
    abandoned.remove_left_over(store, root, where, tell)
    return Pushed(where, len(known.files), total, sending.sent, False)


def require_same(root: Path, known: Manifest) -> None:
    """Refuse to commit a checkpoint that the save folder no longer has. Raises CheckpointError."""
    if layout.place(read_folder(root, known.step)) != layout.place(known):
        folder = root / naming.final_name(known.step)
        raise CheckpointError(f"{folder}: was saved anew while it was sent, so nothing is completed")


def find(store: Store, known: Manifest) -> str | None:
    """Return the prefix of a complete copy of a checkpoint, None where there is none.

    One that was pulled has another manifest than the one that was pushed, and the same files of the same
    generation.
    """
    for where in choose.places(store, known.step)[0]:
        ours = where == layout.place(known)
        if not ours and not (known.generation and _generation(where) == layout.generation(known)):
            continue
        try:
            found = choose.examine(store, where)
        except DamagedError:
            continue  # it is written anew
        files = {file.path: file for file in found.known.files}
        if ours or (
            len(files) == len(known.files)
            and all(file.path in files and choose.is_same(file, files[file.path]) for file in known.files)
        ):
            return where
    return None


def _generation(where: str) -> str:
    return where.rpartition("/")[2].partition("-")[0]


class Sending:
    """Writes files of a checkpoint, and the list of what this node has written.

    What is there already, from a push that was cut short, is not sent again; it is read from the disk for its
    checksum. Large files: `large_file.py`.

    Args:
        store: where to.
        root: the save folder.
        known: the manifest in it.
        where: the prefix of the objects.
        pace: is called with the bytes of each piece before it is sent, and with 0 for one that is there.
        node: the number of this one.
        tell: says that an upload is begun anew.

    Attributes:
        sent: bytes that were sent
        pieces: that were read: it tells that this one is at work
    """

    def __init__(
        self,
        store: Store,
        root: Path,
        known: Manifest,
        where: str,
        pace: Callable[[int], None],
        node: int = 0,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._store = store
        self._root = root
        self._folder = root / naming.final_name(known.step)
        self._seen = layout.place(known)
        self._where = where
        self._pace = pace
        self._node = node
        self._tell_user = tell
        self._parts: dict[str, UploadedPart] = {}
        self._lock = threading.Lock()  # of the list, which a second thread writes, too
        self.sent = 0
        self.pieces = 0
        # Read before this one writes a list.
        self._there = store.objects(where)
        try:
            self._before = choose.read_parts(store, where, self._there)
        except DamagedError:
            self._before = {}  # the files are written anew

    def send(self, files: Iterable[FileEntry]) -> None:
        """Write these files, but for what is there.

        Raises:
            CheckpointError: one is not what the manifest says.
            StoreError: the store refuses, or does not answer.
        """
        for file in files:
            name = f"{self._where}/{file.path}"
            found, part = self._there.get(name), self._before.get(file.path)
            made = None
            if found is not None and self._may_be(file, found, part):
                made = self._hashed(file, name, found, part)
            if made is None:
                made = self._send(file, name)
            self._parts[file.path] = made

    def _send(self, file: FileEntry, name: str) -> UploadedPart:
        """Write a file as the object `name`."""
        store, path = self._store, self._folder / file.path
        if file.bytes > store.piece and store.multipart is not None:
            return LargeFile(
                store,
                store.multipart,
                self._root,
                self._seen,
                path,
                name,
                file,
                self._count,
                self._tell_user,
            ).send()
        digest = xxhash.xxh3_128()

        def pieces() -> Iterator[bytearray]:
            # It ends before the last request of the upload, so that no object has wrong content.
            for piece in file_pieces.compared(path, file, digest, PIECE):
                self._count(len(piece))
                yield piece

        if file.bytes > store.piece:
            etag = store.put_pieces(name, pieces(), file.bytes)
        else:
            etag = store.put(name, b"".join(pieces()))
        return UploadedPart(file.path, file.bytes, digest.hexdigest(), etag)

    @property
    def _is_apart(self) -> bool:
        """Return whether the prefix tells nothing of this content: a disk of its own may have it anew."""
        return self._seen != self._where

    def _may_be(self, file: FileEntry, found: Stored, part: UploadedPart | None) -> bool:
        """Return whether the object that is there may be this file."""
        if part is None:
            return found.bytes == file.bytes and not self._is_apart
        return found.bytes == file.bytes and part.etag == found.etag

    def _hashed(
        self, file: FileEntry, name: str, found: Stored, part: UploadedPart | None
    ) -> UploadedPart | None:
        """Return what is there of a file, by its content on the disk; None: the object has another one.

        A file without a checksum in the manifest may have changed since it was sent. Where no list has it,
        the etag tells, if it is made as most stores with the interface of S3 make it, or the object is read.
        """
        digest, etags = xxhash.xxh3_128(), []
        size = self._store.part_size(file.bytes)
        for content in file_pieces.compared(self._folder / file.path, file, digest, size):
            self._count(0)
            if part is None:
                etags.append(md5(content))
        made = UploadedPart(file.path, file.bytes, digest.hexdigest(), found.etag)
        if part is not None:
            return made if part.xxh3_128 == made.xxh3_128 else None
        if file.xxh3_128 is not None:
            return made
        known = joined(etags) if file.bytes > self._store.piece else "".join(etags)
        if found.etag == known:
            return made
        return made if choose.hash_object(self._store, name, file.bytes) == made.xxh3_128 else None

    def look_again(self) -> None:
        """Read what other nodes have sent since the last look."""
        self._there = self._store.objects(self._where)

    def tell(self, *, done: bool) -> None:
        """Write the list; `done`: this node has sent its part."""
        with self._lock:
            content = layout.encode_parts(
                self._node, list(self._parts.values()), self._seen, done=done, sent=self.sent
            )
            self._store.put(layout.parts_name(self._where, self._node), content)

    def _count(self, count: int) -> None:
        self._pace(count)
        self.sent += count
        self.pieces += 1


def commit(store: Store, known: Manifest) -> int:
    """Write the manifest, if the lists of parts name all files and these are there; return their bytes.

    Args:
        known: of the node that commits. Files that nodes with disks of their own have sent come to it.

    Raises:
        CheckpointError: two nodes have different files of one name.
        DamagedError: one is missing.
    """
    where = layout.place(known)
    there = store.objects(where)
    lists = choose.read_lists(store, where, there)
    parts = choose.parts_of(lists, where, there)
    wanted = {file.path: file.bytes for file in known.files}
    contents = {file.path: {file.xxh3_128} for file in known.files if file.xxh3_128 is not None}
    for one in lists.values():
        for part in one.files:
            contents.setdefault(part.path, set()).add(part.xxh3_128)
            if one.seen not in ("", where):
                wanted.setdefault(part.path, part.bytes)
    for path in wanted:
        if len(contents.get(path, ())) > 1:
            raise CheckpointError(f"{store}/{where}/{path}: two nodes have different files of this name")
    entries = []
    for path, size in sorted(wanted.items()):
        sent, found = parts.get(path), there.get(f"{where}/{path}")
        if sent is None or found is None or found.bytes != size:
            raise DamagedError(
                f"{store}/{where}/{path}: is missing after the upload, so nothing is completed"
            )
        entries.append(FileEntry(path, size, sent.xxh3_128))
    store.put(layout.manifest_name(where), replace(known, files=tuple(entries)).encode())
    return sum(wanted.values())
