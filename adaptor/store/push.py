"""Writes a complete checkpoint of a save folder into a store.

Files first, then the list of this node's parts, and the manifest last. Who dies in between leaves objects
that nobody takes for a checkpoint; the next push of the same checkpoint goes on after them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from adaptor.checkpoint import disk, hashing, manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry
from adaptor.store import choose, layout
from adaptor.store.client import PIECE, DamagedError, Store, Stored

# One node sends all files.
_NODE = "0"


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
        raise CheckpointError(f"{folder / naming.MANIFEST}: is not that of a checkpoint of step {step}")
    return known


def push(store: Store, root: Path, step: int, pace: Callable[[int], None] = lambda count: None) -> Pushed:
    """Write the checkpoint of `step` in the save folder `root` to the store, and commit it.

    Args:
        pace: is called with the bytes of each piece before it is sent.

    Raises:
        CheckpointError: the checkpoint is not complete, or not what its manifest says; nothing is committed.
        StoreError: the store refuses, or does not answer.
    """
    known = read_folder(root, step)
    total = sum(file.bytes for file in known.files)
    there = find(store, known)
    if there is not None:
        return Pushed(there, len(known.files), total, 0, True)
    where = layout.place(known)
    sent = _push_files(store, root, known, pace)
    if layout.place(read_folder(root, step)) != where:
        raise CheckpointError(
            f"{root / naming.final_name(step)}: was saved anew while it was sent, so nothing is completed"
        )
    _commit(store, known)
    return Pushed(where, len(known.files), total, sent, False)


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


def _push_files(store: Store, root: Path, known: Manifest, pace: Callable[[int], None]) -> int:
    """Write the files of a checkpoint, and the list of them; return the bytes that were sent.

    What is there already, from a push that was cut short, is not sent again; it is read from the disk for its
    checksum.
    """
    where, folder = layout.place(known), root / naming.final_name(known.step)
    there = store.objects(where)
    try:
        before = choose.read_parts(store, where, there)
    except DamagedError:
        before = {}  # they are written anew
    parts, sent = [], 0
    for file in known.files:
        name = f"{where}/{file.path}"
        found, part = there.get(name), before.get(file.path)
        if found is None or found.bytes != file.bytes or (part is not None and part.etag != found.etag):
            parts.append(_send(store, folder / file.path, name, file, pace))
            sent += file.bytes
        else:
            parts.append(_hashed(folder / file.path, file, found))
    store.put(layout.parts_name(where, _NODE), layout.encode_parts(_NODE, parts))
    return sent


def _commit(store: Store, known: Manifest) -> None:
    """Write the manifest, if the lists of parts name all files and these are there."""
    where = layout.place(known)
    there = store.objects(where)
    parts = choose.read_parts(store, where, there)
    entries = []
    for file in known.files:
        part, found = parts.get(file.path), there.get(f"{where}/{file.path}")
        if part is None or found is None or found.bytes != file.bytes:
            raise DamagedError(
                f"{store}/{where}/{file.path}: is missing after the upload, so nothing is completed"
            )
        entries.append(FileEntry(file.path, file.bytes, part.xxh3_128))
    store.put(layout.manifest_name(where), replace(known, files=tuple(entries)).encode())


def _send(
    store: Store, path: Path, name: str, file: FileEntry, pace: Callable[[int], None]
) -> layout.UploadedPart:
    digest = xxhash.xxh3_128()

    def pieces() -> Iterator[bytes]:
        # It ends before the last request of the upload, so that no object has wrong content.
        for piece in _compared(path, file, digest):
            pace(len(piece))
            yield piece

    if file.bytes > PIECE:
        etag = store.put_pieces(name, pieces(), file.bytes)
    else:
        etag = store.put(name, b"".join(pieces()))
    return layout.UploadedPart(file.path, file.bytes, digest.hexdigest(), etag)


def _hashed(path: Path, file: FileEntry, found: Stored) -> layout.UploadedPart:
    digest = xxhash.xxh3_128()
    for _ in _compared(path, file, digest):
        pass
    return layout.UploadedPart(file.path, file.bytes, digest.hexdigest(), found.etag)


def _read(path: Path, file: FileEntry) -> Iterator[bytes]:
    """Yield the pieces of a file, which has the size that the manifest says."""
    left = file.bytes
    try:
        with os.fdopen(disk.open_regular(path), "rb", buffering=0) as opened:
            while piece := _filled(opened.read, min(PIECE, left)):
                left -= len(piece)
                yield piece
            more = bool(opened.read(1))
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else manifest.UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror or error})") from None
    if left or more:
        raise CheckpointError(f"{path}: has another size than the {file.bytes} bytes of the manifest")


def _filled(read: Callable[[int], bytes | None], count: int) -> bytes:
    """Return `count` bytes, fewer at the end of the file."""
    piece = read(count) or b""
    while piece and len(piece) < count and (more := read(count - len(piece))):
        piece += more
    return piece


def _compared(path: Path, file: FileEntry, digest: xxhash.xxh3_128) -> Iterator[bytes]:
    """Yield the pieces of a file, and add them to `digest`.

    Raises:
        CheckpointError: behind the last piece, where they are not what the manifest says.
    """
    blocks = hashing.BlockDigest()
    for piece in _read(path, file):
        digest.update(piece)
        if file.xxh3_128_blocks is not None:
            blocks.update(piece)
        yield piece
    same = file.xxh3_128 in (None, digest.hexdigest())
    if not same or file.xxh3_128_blocks not in (None, blocks.hexdigest()):
        raise CheckpointError(f"{path}: checksum differs from the manifest, so it is not sent")
