"""Names and records of a checkpoint in a store.

iter_0000012/0f3a5c21-9be1.../mp_rank_00/model_optim_rng.pt   a file of the folder iter_0000012
iter_0000012/0f3a5c21-9be1.../ttp_parts/0.json                the part list of node 0: checksums and etags
iter_0000012/0f3a5c21-9be1.../ttp_manifest.json               written last: completes the checkpoint

The second part names the generation of workers and, by its checksum, the manifest of the checkpoint in its
save folder. So two checkpoints of a step share no object, even if they are written at the same time, and an
object of an interrupted push that has its full size already belongs to the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import xxhash

from adaptor.checkpoint.manifest import Manifest
from adaptor.protocol import naming
from adaptor.store.client import DamagedError
from adaptor.store.multipart import bare

# The largest part list that is read, in bytes; the list of 100,000 files has 20 MB.
LARGEST_LIST = 64 << 20
_FORMAT = 1
_PARTS = "ttp_parts"


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
