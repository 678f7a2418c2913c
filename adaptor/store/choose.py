"""Lists the checkpoints that a store has, and tells which of them are complete.

The newest is the one of the highest step whose manifest can be read and whose objects are all there in their
sizes. An etag that is not the one of the upload tells that an object was written again: then its content
decides. Nothing else is read, so the choice among thousands costs a few requests; the content is hashed while
it is pulled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from adaptor.checkpoint import manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry
from adaptor.store import layout
from adaptor.store.client import PIECE, DamagedError, Store, Stored


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the prefix of its objects, and its manifest, which has all checksums."""

    where: str
    known: Manifest

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(file.bytes for file in self.known.files)


def steps(store: Store) -> list[int]:
    """Return the steps of which a store has objects, complete or not, in order."""
    return sorted(step for name in store.folders() if (step := naming.step_of(name)) is not None)


def places(store: Store, step: int) -> tuple[list[str], list[str]]:
    """Return the prefixes of the checkpoints of a step: with a manifest, the newest first, and others."""
    root = naming.final_name(step)
    complete, others = {}, []
    for name in store.folders(root):
        where = f"{root}/{name}"
        committed = store.stat(layout.manifest_name(where))
        if committed is None:
            others.append(where)
        else:
            complete[where] = committed.modified
    # Some stores tell seconds: then the manifests, which are read only where there are several.
    made = {where: _created(store, where) if len(complete) > 1 else "" for where in complete}
    return sorted(complete, key=lambda where: (complete[where], made[where], where), reverse=True), others


def _created(store: Store, where: str) -> str:
    try:
        return read_manifest(store, where).created
    except DamagedError:
        return ""


def read_manifest(store: Store, where: str) -> Manifest:
    """Return the manifest at a prefix.

    Raises:
        DamagedError: it is no manifest of a complete checkpoint of this step.
    """
    name = layout.manifest_name(where)
    try:
        known = manifest.decode(store.get(name, manifest.LARGEST), f"{store}/{name}")
    except CheckpointError as error:
        raise DamagedError(str(error)) from None
    if naming.final_name(known.step) != where.partition("/")[0]:
        raise DamagedError(f"{store}/{name}: is the manifest of step {known.step}")
    if not known.files or any(file.xxh3_128 is None for file in known.files):
        raise DamagedError(f"{store}/{name}: names no file, or one without a checksum")
    return known


def examine(store: Store, where: str) -> Checkpoint:
    """Return the checkpoint at a prefix, if its objects are all there.

    Raises:
        DamagedError: they are not; the message names the first.
    """
    known = read_manifest(store, where)
    there = store.objects(where)
    parts = read_parts(store, where, there)
    for file in known.files:
        name = f"{where}/{file.path}"
        found = there.get(name)
        if found is None:
            raise DamagedError(f"{store}/{name}: missing")
        if found.bytes != file.bytes:
            raise DamagedError(f"{store}/{name}: {found.bytes} bytes, the manifest says {file.bytes}")
        part = parts.get(file.path)
        if _is_new(store, found, part) and hash_object(store, name, file.bytes) != file.xxh3_128:
            raise DamagedError(f"{store}/{name}: was changed after the upload")
    return Checkpoint(where, known)


def read_lists(store: Store, where: str, there: dict[str, Stored]) -> dict[int, layout.PartList]:
    """Return the lists of what the nodes have written, by node, among the objects `there` below `where`.

    Raises:
        DamagedError: a list cannot be read.
    """
    found = {}
    for name in sorted(there):
        if layout.is_parts_name(where, name):
            content = store.get(name, layout.LARGEST_LIST)
            one = layout.decode_parts(content, f"{store}/{name}")
            if not (one.node.isascii() and one.node.isdigit()):
                raise DamagedError(f"{store}/{name}: is of {one.node!r}, which is no number of a node")
            found[int(one.node)] = one
    return found


def read_parts(store: Store, where: str, there: dict[str, Stored]) -> dict[str, layout.UploadedPart]:
    """Return what the nodes have written, by path; `where`, `there` and errors are those of `read_lists`."""
    return parts_of(read_lists(store, where, there), where, there)


def parts_of(
    lists: Mapping[int, layout.PartList], where: str, there: Mapping[str, Stored]
) -> dict[str, layout.UploadedPart]:
    """Return the entries of lists by path; where several have a path, that of the object that is there.

    Args:
        lists: by node.
        where: the prefix of the checkpoint.
        there: the objects below it.
    """
    found: dict[str, layout.UploadedPart] = {}
    for one in lists.values():
        for part in one.files:
            stored = there.get(f"{where}/{part.path}")
            if part.path not in found or (stored is not None and stored.etag == part.etag):
                found[part.path] = part
    return found


def _is_new(store: Store, found: Stored, part: layout.UploadedPart | None) -> bool:
    """Return whether an object may have been written again; that of a folder has the etag of an inode."""
    return store.address.scheme != "file" and (part is None or part.etag != found.etag)


def hash_object(store: Store, name: str, size: int) -> str:
    """Return the xxh3-128 of an object, of which all is read.

    Args:
        store: in which it is.
        name: of the object.
        size: of the object, in bytes.

    Raises:
        StoreError: the store refuses, is silent, or has less of it.
    """
    digest = xxhash.xxh3_128()
    for piece in ranges(store, name, size):
        digest.update(piece)
    return str(digest.hexdigest())


def ranges(store: Store, name: str, size: int) -> Iterator[memoryview]:
    """Yield the content of the object `name` of `size` bytes, in pieces, one request after the other."""
    for start in range(0, size, PIECE):
        yield store.get_range(name, start, min(PIECE, size - start))


def wrong_files(store: Store, found: Checkpoint) -> Iterator[str]:
    """Read all objects of a checkpoint; yield a line for each that is not what was written."""
    for file in found.known.files:
        if hash_object(store, f"{found.where}/{file.path}", file.bytes) != file.xxh3_128:
            yield f"{store}/{found.where}/{file.path}: checksum differs from the manifest"


def newest_first(store: Store, step: int | None, problems: list[str]) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints, the newest first.

    Args:
        step: of this one alone; None: of all.
        problems: gets a line for each that is damaged, before an older one is yielded.
    """
    for one in reversed(steps(store)) if step is None else [step]:
        for where in places(store, one)[0]:
            try:
                found = examine(store, where)
            except DamagedError as error:
                problems.append(str(error))
                continue
            yield found


def is_same(one: FileEntry, other: FileEntry) -> bool:
    """Return whether two entries may be of the same content: checksums count where both have one."""
    hashes = {one.xxh3_128, other.xxh3_128} - {None}
    return one.path == other.path and one.bytes == other.bytes and len(hashes) < 2
