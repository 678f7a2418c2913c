"""Names and records of a checkpoint in a store.

iter_0000012/0f3a5c21-9be1.../mp_rank_00/model_optim_rng.pt   a file, as it is in the folder iter_0000012
iter_0000012/0f3a5c21-9be1.../ttp_parts/0.json                what node 0 wrote: checksums and etags
iter_0000012/0f3a5c21-9be1.../ttp_manifest.json               written last: with it, and not before, the
                                                              checkpoint is there

The second part names the generation of workers and, by its checksum, the manifest that the checkpoint has in
its save folder. So two checkpoints of one step share no object, whoever writes them at the same time, and an
object that is there already in its full size, from a push that was cut short, is the one that belongs there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import xxhash

from adaptor.checkpoint.manifest import Manifest
from adaptor.protocol import naming
from adaptor.store.client import DamagedError
from adaptor.store.etags import bare

# The largest list of parts that is read, in bytes; that of 100,000 files has 20 MB.
LARGEST_LIST = 64 << 20
_FORMAT = 1
_PARTS = "ttp_parts"


class UploadedPart(msgspec.Struct, frozen=True):
    """A file that was written to the store.

    Attributes:
        path: below the folder of the checkpoint
        xxh3_128: of what was sent, in hexadecimal
        etag: that the store gave it, without quotes
    """

    path: str
    bytes: int
    xxh3_128: str
    etag: str


class PartList(msgspec.Struct, frozen=True):
    """The list of what a node has written of a checkpoint; it is there before the first file is.

    Attributes:
        files: that are in the store as a whole
        seen: the `place` of the manifest in the save folder of that node; nodes with the same one share it
        done: whether the node has sent all that is its part
        sent: bytes so far, also of files that are not there yet: a sign of life
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
        saved_manifest: its manifest, as it is in the save folder.
    """
    mark = xxhash.xxh3_64(saved_manifest.encode()).hexdigest()
    return f"{naming.final_name(saved_manifest.step)}/{generation(saved_manifest)}-{mark}"


def generation(saved_manifest: Manifest) -> str:
    """Return the beginning of the last part of `place`: the generation of workers, `none` where unknown."""
    return re.sub("[^0-9A-Za-z]", "", saved_manifest.generation)[:8] or "none"


def is_of_same_generation(first_place: str, second_place: str) -> bool:
    """Return whether two prefixes are those of one checkpoint, or of copies by the same workers."""
    first_generation = first_place.partition("-")[0]
    return first_place == second_place or (
        first_generation == second_place.partition("-")[0] and not first_generation.endswith("/none")
    )


def manifest_name(prefix: str) -> str:
    """Return the name of the manifest of the checkpoint at the prefix `prefix`."""
    return f"{prefix}/{naming.MANIFEST}"


def parts_name(prefix: str, node: int) -> str:
    """Return the name of the list of what a node has written."""
    return f"{parts_prefix(prefix)}{node}.json"


def is_parts_name(prefix: str, name: str) -> bool:
    """Return whether an object is such a list."""
    return name.startswith(parts_prefix(prefix))


def parts_prefix(prefix: str) -> str:
    """Return what the names of these lists begin with."""
    return f"{prefix}/{_PARTS}/"


def encode_parts(
    node: int,
    files: Iterable[UploadedPart],
    manifest_place: str = "",
    *,
    is_complete: bool = True,
    sent: int = 0,
) -> bytes:
    """Return the content of the list of what a node has written.

    Args:
        node: its number.
        files: that are in the store as a whole.
        manifest_place: the `place` of the manifest in its save folder.
        is_complete: whether it has sent all that is its part.
        sent: bytes so far.
    """
    ordered = tuple(sorted(files, key=lambda part: part.path))
    part_list = PartList(_FORMAT, str(node), ordered, manifest_place, is_complete, sent)
    return msgspec.json.format(msgspec.json.encode(part_list), indent=1)


def decode_parts(content: bytes, name: str) -> PartList:
    """Return such a list.

    Args:
        name: of the object, for the message.

    Raises:
        DamagedError: it is none.
    """
    try:
        part_list = msgspec.json.decode(content, type=PartList)
    except msgspec.MsgspecError as error:
        raise DamagedError(f"{name}: is no list of parts ({error})") from None
    if part_list.format != _FORMAT:
        raise DamagedError(f"{name}: format {part_list.format}; this version reads format {_FORMAT}")
    # Earlier versions noted an etag as it was spelled in that answer.
    files = tuple(msgspec.structs.replace(part, etag=bare(part.etag)) for part in part_list.files)
    return msgspec.structs.replace(part_list, files=files)
