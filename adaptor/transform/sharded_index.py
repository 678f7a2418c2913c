"""Reads the index of a sharded checkpoint: the file `.metadata` of torch.distributed.checkpoint.

The index is a pickle, which `pickles.py` reads without importing anything. A sharded checkpoint is a set of
objects and of whole tensors, each in chunks. Each chunk and each object is an archive of torch; the archives
lie one behind the other in files `*.distcp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from adaptor.checkpoint import disk
from adaptor.errors import CheckpointError
from adaptor.transform import pickles
from adaptor.transform.records import SIZES, Archive, Described, DType, ItemKey

NAME = ".metadata"
_LARGEST = 1 << 30  # bytes: of 10,000 tensors in 100 chunks each it has about 400 MB


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a whole tensor: its shape, and the archive that it is in."""

    shape: tuple[int, ...]
    archive: Archive


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the whole model, with its chunks by their offset."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Mapping[tuple[int, ...], StoredChunk]


@dataclass(frozen=True)
class Index:
    """The tensors and objects of a sharded checkpoint, by name."""

    path: Path
    tensors: Mapping[str, WholeTensor]
    objects: Mapping[str, Archive]


def read(folder: Path) -> Index:
    """Read the index of the checkpoint in `folder`; no file that the index names is opened.

    Raises:
        CheckpointError: the index cannot be read, is damaged, or has an object that is not read.
    """
    path = folder / NAME
    try:
        return _index(pickles.load(disk.read(path, _LARGEST), path, {}, is_index=True), path)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: there is not enough memory to read it") from error
    except Exception as error:  # a damaged pickle raises any exception
        raise CheckpointError(
            f"{path}: is no index of a sharded checkpoint, or is damaged ({error})"
        ) from error


def _index(value: Any, path: Path) -> Index:
    index_state = _state(value, "Metadata")
    places = {
        key: _archive(_state(place, "_StorageInfo"), path)
        for key, place in index_state["storage_data"].items()
        if isinstance(key, ItemKey)
    }
    tensors: dict[str, WholeTensor] = {}
    objects: dict[str, Archive] = {}
    for name, tensor_metadata in index_state["state_dict_metadata"].items():
        if type(name) is not str:
            raise ValueError("a name is not a text")
        if tensor_metadata.source.name == "BytesStorageMetadata":
            objects[name] = _archive_of(places, ItemKey(name, None), path)
            continue
        tensor = _state(tensor_metadata, "TensorStorageMetadata")
        dtype = tensor["properties"].state[0]
        if not isinstance(dtype, DType) or dtype.name not in SIZES:
            raise CheckpointError(f"{path}: {name[:200]} is of a type that is not read")
        chunks = {}
        for chunk in tensor["chunks"]:
            place = _state(chunk, "ChunkStorageMetadata")
            offset = _lengths(place["offsets"])
            archive = _archive_of(places, ItemKey(name, offset), path)
            chunks[offset] = StoredChunk(_lengths(place["sizes"]), archive)
        tensors[name] = WholeTensor(dtype.name, _lengths(tensor["size"]), chunks)
    return Index(path, tensors, objects)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, Described) or value.source.name != name or type(value.state) is not dict:
        raise ValueError(f"there is no {name}")
    return value.state


def _lengths(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(length) is int and length >= 0 for length in value):
        raise ValueError("a shape is no tuple of numbers")
    return value


def _archive_of(places: Mapping[ItemKey, Archive], key: ItemKey, path: Path) -> Archive:
    if key not in places:
        position = "" if key.offset is None else f" at {list(key.offset)}"
        raise CheckpointError(f"{path}: does not say where {key.name[:200]}{position} lies")
    return places[key]


def _archive(storage_record: Mapping[str, Any], path: Path) -> Archive:
    name, begin, length = storage_record["relative_path"], storage_record["offset"], storage_record["length"]
    if type(name) is not str or PurePosixPath(name).name != name or name in (".", "..", ""):
        raise CheckpointError(f"{path}: names the file {name!a:.200}, which is none of its folder")
    if not all(type(number) is int and 0 <= number < 2**53 for number in (begin, length)):
        raise ValueError("an item has no place")
    if storage_record.get("transform_descriptors"):
        raise CheckpointError(
            f"{path}: has items that are compressed or changed otherwise, which is not read"
        )
    return Archive(path.parent / name, begin, length)
