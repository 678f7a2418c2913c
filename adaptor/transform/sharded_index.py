"""Reads the index of a sharded checkpoint: the file `.metadata` of torch.distributed.checkpoint.

The index is a pickle, which `archive.py` reads without importing anything. A sharded checkpoint is a set of
objects and of whole tensors, each in chunks. Each chunk and each object is an archive of torch; the archives
lie one behind the other in files `*.distcp`.

Below: the names and places that Megatron-core gives to the tensors of a model in its sharded format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from adaptor.checkpoint import disk
from adaptor.checkpoint.layout_file import Piece
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.transform import archive
from adaptor.transform.records import SIZES, Archive, Described, DType, ItemKey
from adaptor.transform.rules import Cut

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
    with archive.in_one_line(path, "index of a sharded checkpoint"):
        return _index(archive.load(disk.read(path, _LARGEST), path, {}, is_index=True), path)


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


# The prefix of a tensor of the optimizer's state, in front of the name of its param.
STATE = "optimizer.state."
EXTRA_STATE = "_extra_state"
# The halves of a gated MLP's input, where each is a whole tensor.
_HALVES = ("_w", "_v")
_NUMBERED = re.compile(r"(?:.*\.)?layers\.\d+\..*")
_NUMBERED_EXPERT = re.compile(r".*\.experts\.\d+\..*")


@dataclass(frozen=True)
class ShardedRegion:
    """A part of a whole tensor in the sharded format, of one model-parallel rank.

    Attributes:
        name: of the whole tensor
        whole_shape: its shape
        offset: of the part in the whole tensor
        shape: of the part
    """

    name: str
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorName:
    """The name and numbers of a tensor in the sharded format, without how it is cut.

    Attributes:
        key: its name without numbers of layers and experts, or with them, as the model has it
        layer: its number in the whole model
        expert: its number in the layer
        layers: the number of layers of the model
        experts: the number of experts of a layer
    """

    key: str
    layer: int | None
    expert: int | None
    layers: int
    experts: int

    def name(self) -> str:
        """Return the name with numbers of layer and expert."""
        name = self.key
        if self.layer is not None and not _NUMBERED.fullmatch(name):
            name = name.replace("layers.", f"layers.{self.layer}.", 1)
        if self.expert is not None and not _NUMBERED_EXPERT.fullmatch(name):
            name = name.replace(".experts.experts.", f".experts.experts.{self.expert}.", 1)
        return name

    def front(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return place and length along the axes of layer and expert, which the key does not number."""
        axes = []
        if self.layer is not None and not _NUMBERED.fullmatch(self.key):
            axes.append((self.layer, self.layers))
        if self.expert is not None and not _NUMBERED_EXPERT.fullmatch(self.key):
            axes.append((self.expert, self.experts))
        return tuple(at for at, _ in axes), tuple(length for _, length in axes)


def regions(
    place: TensorName, whole_shape: tuple[int, ...], cut: Cut, pieces: tuple[Piece, ...], *, numbered: bool
) -> list[ShardedRegion]:
    """Return where the pieces of a rank's tensor are in the sharded format, in the order of its rows.

    Args:
        place: of the tensor.
        whole_shape: its shape in the whole model.
        cut: the way in which ranks share the tensor.
        pieces: the rank's pieces of the axis that is cut.
        numbered: each layer and each expert has whole tensors of its own (`singleton_local_shards`, since
            core 0.14); else they lie behind each other along axes in front.
    """
    name, at, lengths = (place.name(), (), ()) if numbered else (place.key, *place.front())
    unit_shape = (1,) * len(lengths)
    if cut.axis is None:
        return [
            ShardedRegion(
                name, (*lengths, *whole_shape), (*at, *(0 for _ in whole_shape)), (*unit_shape, *whole_shape)
            )
        ]
    regions_found = []
    for number, piece in enumerate(pieces):
        axis, own_offset, shape = list(whole_shape), [0] * len(whole_shape), list(whole_shape)
        shape[cut.axis] = piece.length
        own_offset[cut.axis] = piece.whole
        half = ""
        if numbered and cut.pieces == len(_HALVES):
            axis[cut.axis] = whole_shape[cut.axis] // cut.pieces
            own_offset[cut.axis] -= number * axis[cut.axis]
            half = _HALVES[number]
        regions_found.append(
            ShardedRegion(name + half, (*lengths, *axis), (*at, *own_offset), (*unit_shape, *shape))
        )
    return regions_found


def key_of(name: str, *, is_local: bool) -> str:
    """Return the name in the sharded format of a tensor of the whole model, by the rules of core 0.15.

    Args:
        name: with numbers of layer and expert.
        is_local: the model is made of Megatron-core's own layers, not of Transformer Engine's.
    """
    if is_local:
        name = re.sub(r"\.input_layernorm\.", ".self_attention.linear_qkv.layer_norm_", name)
        name = re.sub(r"\.pre_mlp_layernorm\.", ".mlp.linear_fc1.layer_norm_", name)
    return name.replace(".experts.local_experts.", ".experts.experts.")


def fragments(
    place: TensorName,
    shape: tuple[int, ...],
    whole_shape: tuple[int, ...],
    cut: Cut,
    pieces: tuple[Piece, ...],
) -> list[tuple[str, tuple[int, ...], int]]:
    """Return where the pieces of a rank's tensor are in the flat kind (`fully_sharded_model_space`).

    Args:
        place: of the tensor.
        shape: on the rank.
        whole_shape: its shape in the whole model.
        cut: the way in which ranks share the tensor.
        pieces: the rank's pieces of the axis that is cut.

    Returns:
        For each piece the name of the whole tensor, the place along all its axes but the last, the elements.

    Raises:
        UnsupportedError: the pieces are not of the same length.
    """
    at, _ = place.front()
    if cut.axis is None:
        return [(place.key, (*at, *(0 for _ in whole_shape)), prod(shape))]
    fragments_found = []
    for piece in pieces:
        if whole_shape[cut.axis] % piece.length or piece.whole % piece.length:
            raise UnsupportedError(f"{place.key}: is cut into uneven pieces; not transformed")
        own_offset = [0] * len(whole_shape)
        own_offset[cut.axis] = piece.whole // piece.length
        count = prod(shape) // shape[cut.axis] * piece.length
        fragments_found.append((place.key, (*at, *own_offset), count))
    return fragments_found
