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
    complete, incomplete = {}, []
    for name in store.folders(root):
        prefix = f"{root}/{name}"
        committed = store.stat(layout.manifest_name(prefix))
        if committed is None:
            incomplete.append(prefix)
        else:
            complete[prefix] = committed.modified
    # Some stores tell seconds: then the manifests, which are read only where there are several.
    created = {prefix: _created(store, prefix) if len(complete) > 1 else "" for prefix in complete}
    return sorted(
        complete, key=lambda prefix: (complete[prefix], created[prefix], prefix), reverse=True
    ), incomplete


def _created(store: Store, prefix: str) -> str:
    try:
        return read_manifest(store, prefix).created
    except DamagedError:
        return ""


def read_manifest(store: Store, prefix: str) -> Manifest:
    """Return the manifest at a prefix.

    Raises:
        DamagedError: it is no manifest of a complete checkpoint of this step.
    """
    name = layout.manifest_name(prefix)
    try:
        saved_manifest = manifest.decode(store.get(name, manifest.LARGEST), f"{store}/{name}")
    except CheckpointError as error:
        raise DamagedError(str(error)) from None
    if naming.final_name(saved_manifest.step) != prefix.partition("/")[0]:
        raise DamagedError(f"{store}/{name}: is the manifest of step {saved_manifest.step}")
    if not saved_manifest.files or any(file.xxh3_128 is None for file in saved_manifest.files):
        raise DamagedError(f"{store}/{name}: names no file, or one without a checksum")
    return saved_manifest


def examine(store: Store, prefix: str) -> Checkpoint:
    """Return the checkpoint at a prefix, if its objects are all there.

    Raises:
        DamagedError: they are not; the message names the first.
    """
    saved_manifest = read_manifest(store, prefix)
    stored_objects = store.objects(prefix)
    parts = read_parts(store, prefix, stored_objects)
    for file in saved_manifest.files:
        name = f"{prefix}/{file.path}"
        stored = stored_objects.get(name)
        if stored is None:
            raise DamagedError(f"{store}/{name}: missing")
        if stored.bytes != file.bytes:
            raise DamagedError(f"{store}/{name}: {stored.bytes} bytes, the manifest says {file.bytes}")
        part = parts.get(file.path)
        if _is_new(store, stored, part) and hash_object(store, name, file.bytes) != file.xxh3_128:
            raise DamagedError(f"{store}/{name}: was changed after the upload")
    return Checkpoint(prefix, saved_manifest)


def read_lists(store: Store, prefix: str, stored_objects: dict[str, Stored]) -> dict[int, layout.PartList]:
    """Return the lists of what the nodes have written, by node, among the objects `stored_objects` below
    `prefix`.

    Raises:
        DamagedError: a list cannot be read.
    """
    lists_by_node = {}
    for name in sorted(stored_objects):
        if layout.is_parts_name(prefix, name):
            content = store.get(name, layout.LARGEST_LIST)
            part_list = layout.decode_parts(content, f"{store}/{name}")
            if not (part_list.node.isascii() and part_list.node.isdigit()):
                raise DamagedError(f"{store}/{name}: is of {part_list.node!r}, which is no number of a node")
            lists_by_node[int(part_list.node)] = part_list
    return lists_by_node


def read_parts(
    store: Store, prefix: str, stored_objects: dict[str, Stored]
) -> dict[str, layout.UploadedPart]:
    """Return what the nodes have written, by path; `prefix`, `stored_objects` and errors are those of
    `read_lists`.
    """
    return parts_of(read_lists(store, prefix, stored_objects), prefix, stored_objects)


def parts_of(
    lists: Mapping[int, layout.PartList], prefix: str, stored_objects: Mapping[str, Stored]
) -> dict[str, layout.UploadedPart]:
    """Return the entries of lists by path; where several have a path, that of the object that is there.

    Args:
        lists: by node.
        prefix: the prefix of the checkpoint.
        stored_objects: the objects below it.
    """
    parts_by_path: dict[str, layout.UploadedPart] = {}
    for part_list in lists.values():
        for part in part_list.files:
            stored = stored_objects.get(f"{prefix}/{part.path}")
            if part.path not in parts_by_path or (stored is not None and stored.etag == part.etag):
                parts_by_path[part.path] = part
    return parts_by_path


def _is_new(store: Store, stored: Stored, part: layout.UploadedPart | None) -> bool:
    """Return whether an object may have been written again; that of a folder has the etag of an inode."""
    return store.address.scheme != "file" and (part is None or part.etag != stored.etag)


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


def wrong_files(store: Store, checkpoint: Checkpoint) -> Iterator[str]:
    """Read all objects of a checkpoint; yield a line for each that is not what was written."""
    for file in checkpoint.known.files:
        if hash_object(store, f"{checkpoint.where}/{file.path}", file.bytes) != file.xxh3_128:
            yield f"{store}/{checkpoint.where}/{file.path}: checksum differs from the manifest"


def newest_first(store: Store, step: int | None, problems: list[str]) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints, the newest first.

    Args:
        step: of this one alone; None: of all.
        problems: gets a line for each that is damaged, before an older one is yielded.
    """
    for number in reversed(steps(store)) if step is None else [step]:
        for prefix in places(store, number)[0]:
            try:
                checkpoint = examine(store, prefix)
            except DamagedError as error:
                problems.append(str(error))
                continue
            yield checkpoint


def is_same(first: FileEntry, second: FileEntry) -> bool:
    """Return whether two entries may be of the same content: checksums count where both have one."""
    hashes = {first.xxh3_128, second.xxh3_128} - {None}
    return first.path == second.path and first.bytes == second.bytes and len(hashes) < 2
