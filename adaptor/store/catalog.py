"""Lists the checkpoints of a store, and finds the complete ones.

The newest checkpoint is the checkpoint of the highest step with a readable manifest and with all objects in
their sizes. An etag that differs from the etag of the upload means that the object was written again: then
its content decides. Nothing else is read, so the choice among thousands of checkpoints costs a few requests;
a pull hashes the content.

iter_0000012/0f3a5c21-9be1.../mp_rank_00/model_optim_rng.pt   a file of the folder iter_0000012
iter_0000012/0f3a5c21-9be1.../ttp_parts/0.json                the part list of node 0: checksums and etags
iter_0000012/0f3a5c21-9be1.../ttp_manifest.json               written last: completes the checkpoint

The second part of a name has the generation of workers and, by its checksum, the manifest of the checkpoint
in its save folder. So two checkpoints of a step share no object, even if they are written at the same time,
and an object of an interrupted push that has its full size already belongs to the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec
import xxhash

from adaptor.checkpoint import manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.store.client import PIECE, DamagedError, Store, Stored
from adaptor.store.multipart import bare

# The largest part list that is read, in bytes; the list of 100,000 files has 20 MB.
LARGEST_LIST = 64 << 20
_FORMAT = 1  # of a part list
_PARTS = "ttp_parts"


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
        committed = store.stat(manifest_name(prefix))
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
    name = manifest_name(prefix)
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


def read_lists(store: Store, prefix: str, stored_objects: dict[str, Stored]) -> dict[int, PartList]:
    """Return the part lists of the nodes, by node, among the objects `stored_objects` below `prefix`.

    Raises:
        DamagedError: a list cannot be read.
    """
    lists_by_node = {}
    for name in sorted(stored_objects):
        if is_parts_name(prefix, name):
            content = store.get(name, LARGEST_LIST)
            part_list = decode_parts(content, f"{store}/{name}")
            if not (part_list.node.isascii() and part_list.node.isdigit()):
                raise DamagedError(f"{store}/{name}: is of {part_list.node!r}, which is no number of a node")
            lists_by_node[int(part_list.node)] = part_list
    return lists_by_node


def read_parts(store: Store, prefix: str, stored_objects: dict[str, Stored]) -> dict[str, UploadedPart]:
    """Return the files that the nodes have written, by path; arguments and errors as in `read_lists`."""
    return parts_of(read_lists(store, prefix, stored_objects), prefix, stored_objects)


def parts_of(
    lists: Mapping[int, PartList], prefix: str, stored_objects: Mapping[str, Stored]
) -> dict[str, UploadedPart]:
    """Return the entries of lists by path; of several entries for a path the entry of the stored object.

    Args:
        lists: by node.
        prefix: the prefix of the checkpoint.
        stored_objects: the objects below the prefix.
    """
    parts_by_path: dict[str, UploadedPart] = {}
    for part_list in lists.values():
        for part in part_list.files:
            stored = stored_objects.get(f"{prefix}/{part.path}")
            if part.path not in parts_by_path or (stored is not None and stored.etag == part.etag):
                parts_by_path[part.path] = part
    return parts_by_path


def _is_new(store: Store, stored: Stored, part: UploadedPart | None) -> bool:
    """Return whether an object may have been written again. In a folder an etag is made from the inode."""
    return store.address.scheme != "file" and (part is None or part.etag != stored.etag)


def hash_object(store: Store, name: str, size: int) -> str:
    """Return the xxh3-128 of an object, which is read whole.

    Args:
        store: the store of the object.
        name: of the object.
        size: of the object, in bytes.
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


class UploadedPart(msgspec.Struct, frozen=True):
    """A file that was written to the store.

    Attributes:
        path: below the folder of the checkpoint
        xxh3_128: of the sent content, in hexadecimal
        etag: from the store, without quotes
    """

    path: str
    bytes: int
    xxh3_128: str
    etag: str


class PartList(msgspec.Struct, frozen=True):
    """The files of a checkpoint that a node has written; the list is written before the first file.

    Attributes:
        files: the files that are in the store as a whole
        seen: the `place` of the manifest in the save folder of the node; nodes with the same place share the
            folder
        done: the node has sent its whole part
        sent: bytes so far, also of unfinished files: a sign of life
    """

    format: int
    node: str
    files: tuple[UploadedPart, ...]
    seen: str = ""
    done: bool = True
    sent: int = 0


def place(saved_manifest: Manifest) -> str:
    """Return the prefix of the objects of a checkpoint.

    Args:
        saved_manifest: the manifest in the save folder.
    """
    mark = xxhash.xxh3_64(saved_manifest.encode()).hexdigest()
    return f"{naming.final_name(saved_manifest.step)}/{generation(saved_manifest)}-{mark}"


def generation(saved_manifest: Manifest) -> str:
    """Return the beginning of the last part of `place`: the generation of workers, `none` if unknown."""
    return re.sub("[^0-9A-Za-z]", "", saved_manifest.generation)[:8] or "none"


def is_of_same_generation(first_place: str, second_place: str) -> bool:
    """Return whether two prefixes belong to one checkpoint, or to copies by the same workers."""
    first_generation = first_place.partition("-")[0]
    return first_place == second_place or (
        first_generation == second_place.partition("-")[0] and not first_generation.endswith("/none")
    )


def manifest_name(prefix: str) -> str:
    """Return the name of the manifest of the checkpoint at `prefix`."""
    return f"{prefix}/{naming.MANIFEST}"


def parts_name(prefix: str, node: int) -> str:
    """Return the name of the part list of a node."""
    return f"{parts_prefix(prefix)}{node}.json"


def is_parts_name(prefix: str, name: str) -> bool:
    """Return whether an object is a part list."""
    return name.startswith(parts_prefix(prefix))


def parts_prefix(prefix: str) -> str:
    """Return the beginning of the names of part lists."""
    return f"{prefix}/{_PARTS}/"


def encode_parts(
    node: int,
    files: Iterable[UploadedPart],
    manifest_place: str = "",
    *,
    is_complete: bool = True,
    sent: int = 0,
) -> bytes:
    """Return the content of the part list of a node.

    Args:
        node: its number.
        files: that are in the store as a whole.
        manifest_place: the `place` of the manifest in its save folder.
        is_complete: the node has sent its whole part.
        sent: bytes so far.
    """
    ordered = tuple(sorted(files, key=lambda part: part.path))
    part_list = PartList(_FORMAT, str(node), ordered, manifest_place, is_complete, sent)
    return msgspec.json.format(msgspec.json.encode(part_list), indent=1)


def decode_parts(content: bytes, name: str) -> PartList:
    """Return a part list.

    Args:
        content: of the object.
        name: of the object, for the message.

    Raises:
        DamagedError: the content is no part list.
    """
    try:
        part_list = msgspec.json.decode(content, type=PartList)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{name}: is no list of parts ({error})") from None
    if part_list.format != _FORMAT:
        raise DamagedError(f"{name}: format {part_list.format}; this version reads format {_FORMAT}")
    # Earlier versions noted etags with quotes.
    files = tuple(msgspec.structs.replace(part, etag=bare(part.etag)) for part in part_list.files)
    return msgspec.structs.replace(part_list, files=files)
