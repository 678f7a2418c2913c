"""Makes the index of a sharded checkpoint that was written: `.metadata`, which `sharded_index` reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from adaptor.transform import writing
from adaptor.transform.records import Described, DType, ItemKey, Name

_METADATA, _STORAGE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class NewItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An item that was written: a chunk of a tensor, or an object, which has no dtype.

    Attributes:
        name: of the whole tensor, or of the object
        file: below the checkpoint's folder
        begin: of its archive in the file, in bytes
        length: of the archive, in bytes
        dtype: by torch's name
        whole: shape of the whole tensor
        offset: of the chunk in it
        shape: of the chunk
    """

    name: str
    file: str
    begin: _Count
    length: _Count
    dtype: str = ""
    whole: tuple[_Count, ...] = ()
    offset: tuple[_Count, ...] = ()
    shape: tuple[_Count, ...] = ()


def content(items: Iterable[NewItem]) -> bytes:
    """Return the content of the index of these items, as torch and Megatron-core read it."""
    tensors: dict[str, list[NewItem]] = {}
    stored = {}
    for item in items:
        tensors.setdefault(item.name, []).append(item)
        key = ItemKey(item.name, item.offset if item.dtype else None)
        place = {
            "relative_path": item.file,
            "offset": item.begin,
            "length": item.length,
            "transform_descriptors": None,
        }
        stored[key] = writing.described("_StorageInfo", place, _STORAGE)
    layout = Described(Name("torch.serialization", "_get_layout"), ("torch.strided",), is_new=False)
    memory = Described(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,), is_new=False)
    metadata_state: dict[str, Any] = {}
    for name, chunks in tensors.items():
        first = chunks[0]
        if not first.dtype:
            metadata_state[name] = writing.described("BytesStorageMetadata", {})
            continue
        properties = (DType(first.dtype), layout, False, memory, False)
        metadata_state[name] = writing.described(
            "TensorStorageMetadata",
            {
                "properties": writing.described("TensorProperties", properties),
                "size": writing.size(first.whole),
                "chunks": [
                    writing.described(
                        "ChunkStorageMetadata",
                        {"offsets": writing.size(chunk.offset), "sizes": writing.size(chunk.shape)},
                    )
                    for chunk in chunks
                ],
            },
        )
    return writing.structure(
        writing.described(
            "Metadata",
            {
                "state_dict_metadata": metadata_state,
                "planner_data": None,
                "storage_data": stored,
                "storage_meta": None,
                "version": "1.0.0",
                "mcore_data": {},  # which Megatron-core asks for
            },
        )
    )
