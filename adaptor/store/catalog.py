"""Lists the checkpoints of a store, and finds the complete ones.

The newest checkpoint is the checkpoint of the highest step with a readable manifest and with all objects in
their sizes. An etag that differs from the etag of the upload means that the object was written again: then
its content decides. Nothing else is read, so the choice among thousands of checkpoints costs a few requests;
a pull hashes the content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import xxhash

from adaptor.checkpoint import manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store import layout
from adaptor.store.client import PIECE, DamagedError, Store, Stored


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: the prefix of its objects, and its manifest with all checksums."""

    prefix: str
    saved_manifest: Manifest

    @property
    def bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.bytes for file in self.saved_manifest.files)


def steps(store: Store) -> list[int]:
    """Return the steps with objects in a store, complete or not, in order."""
    return sorted(step for name in store.folders() if (step := naming.step_of(name)) is not None)


def places(store: Store, step: int) -> tuple[list[str], list[str]]:
    """Return the prefixes of the checkpoints of a step: with a manifest, the newest first, and without."""
    root = naming.final_name(step)
    complete, incomplete = {}, []
    for name in store.folders(root):
        prefix = f"{root}/{name}"
        committed = store.stat(layout.manifest_name(prefix))
        if committed is None:
            incomplete.append(prefix)
        else:
            complete[prefix] = committed.modified
    # Some stores give times in seconds: then the times in the manifests decide, read only for several.
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
        DamagedError: the object is no manifest of a complete checkpoint of this step.
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
    """Return the checkpoint at a prefix, if the store has all its objects.

    Raises:
        DamagedError: names the first missing or wrong object.
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
    """Return the part lists of the nodes, by node, among the objects `stored_objects` below `prefix`.

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
    """Return the files that the nodes have written, by path; arguments and errors as in `read_lists`."""
    return parts_of(read_lists(store, prefix, stored_objects), prefix, stored_objects)


def parts_of(
    lists: Mapping[int, layout.PartList], prefix: str, stored_objects: Mapping[str, Stored]
) -> dict[str, layout.UploadedPart]:
    """Return the entries of lists by path; of several entries for a path the entry of the stored object.

    Args:
        lists: by node.
        prefix: the prefix of the checkpoint.
        stored_objects: the objects below the prefix.
    """
    parts_by_path: dict[str, layout.UploadedPart] = {}
    for part_list in lists.values():
        for part in part_list.files:
            stored = stored_objects.get(f"{prefix}/{part.path}")
            if part.path not in parts_by_path or (stored is not None and stored.etag == part.etag):
                parts_by_path[part.path] = part
    return parts_by_path


def _is_new(store: Store, stored: Stored, part: layout.UploadedPart | None) -> bool:
    """Return whether an object may have been written again. In a folder an etag is made from the inode."""
    return store.address.scheme != "file" and (part is None or part.etag != stored.etag)


def hash_object(store: Store, name: str, size: int) -> str:
    """Return the xxh3-128 of an object, which is read whole.

    Args:
        store: the store of the object.
        name: of the object.
        size: of the object, in bytes.

    Raises:
        StoreError: the store refuses, is silent, or has fewer bytes.
    """
    digest = xxhash.xxh3_128()
    for piece in ranges(store, name, size):
        digest.update(piece)
    return str(digest.hexdigest())


def ranges(store: Store, name: str, size: int) -> Iterator[memoryview]:
    """Yield the content of the object `name` of `size` bytes, in pieces, each by a request."""
    for start in range(0, size, PIECE):
        yield store.get_range(name, start, min(PIECE, size - start))


def wrong_files(store: Store, checkpoint: Checkpoint) -> Iterator[str]:
    """Read all objects of a checkpoint; yield a line for each object that differs from the manifest."""
    for file in checkpoint.saved_manifest.files:
        if hash_object(store, f"{checkpoint.prefix}/{file.path}", file.bytes) != file.xxh3_128:
            yield f"{store}/{checkpoint.prefix}/{file.path}: checksum differs from the manifest"


def newest_first(store: Store, step: int | None, problems: list[str]) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints, the newest first.

    Args:
        store: the store.
        step: of this step alone; None: of all steps.
        problems: receives a line for each damaged checkpoint, before an older checkpoint is yielded.
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
    """Return whether two entries may have the same content; two checksums are compared."""
    hashes = {first.xxh3_128, second.xxh3_128} - {None}
    return first.path == second.path and first.bytes == second.bytes and len(hashes) < 2
