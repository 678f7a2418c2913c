"""Writes a checkpoint of the format `torch_dist`: one data file for each model-parallel rank of the target.

The optimizer's state is written as `fully_reshardable`: a tensor for each param, in its shape, which
Megatron-LM loads in any parallel sizes. State that ranks share is in the file of the first rank that has it.
The index `.metadata` has the form that `sharded_index` reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from adaptor.checkpoint import dcp, disk
from adaptor.checkpoint.layout_file import Piece
from adaptor.protocol.naming import FileEntry
from adaptor.transform import rules, sharded_index, sharded_names, writing
from adaptor.transform.contents import STATES
from adaptor.transform.copying import Files
from adaptor.transform.model import Slot
from adaptor.transform.random_states import states_of
from adaptor.transform.records import Described, DType, ItemKey, Name, NewTensor
from adaptor.transform.sharded_names import EXTRA_STATE, STATE, ShardedRegion, TensorName
from adaptor.transform.sharded_source import COMMON, CONFIG, RESHARDABLE
from adaptor.transform.sizes import Rank
from adaptor.transform.source import WEIGHT
from adaptor.transform.target import TargetCheckpoint

# The description of the content for the framework, which loads just these tensors.
_CONTENT = {
    "singleton_local_shards": True,
    "distrib_optim_sharding_type": RESHARDABLE,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
_CONFIG = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class _Tensor:
    """A tensor that a rank writes: the part of the slot, the prefix of its name, its kind, its region."""

    slot: Slot
    front: str
    kind: str
    region: ShardedRegion


def data_file(target: TargetCheckpoint, rank: Rank) -> str:
    """Return the name of the file of a rank."""
    return f"__{target.sizes.ranks.index(rank)}_0.distcp"


def write_rank(
    target: TargetCheckpoint, rank: Rank, folder: Path, files: Files, progress: Callable[[int], None]
) -> tuple[FileEntry, list[NewItem], str]:
    """Write the file of one rank; return its entry in the manifest, its items for the index, its SHA-256.

    The SHA-256 is empty where the framework does not want one.

    Args:
        target: the checkpoint to write.
        rank: of the target.
        folder: of the file.
        files: of the source.
        progress: receives the number of newly written bytes.

    Raises:
        OSError: the disk refuses.
        CheckpointError: a file is damaged, or the main params do not round to the weights.
    """
    name = data_file(target, rank)
    items: list[NewItem] = []
    digest = hashlib.sha256()
    with writing.HashedFile(folder / name, folder, progress) as stream:
        if target.has_integrity:
            stream.also(digest.update)
        for tensor in _tensors(target, rank):
            dtype = tensor.slot.item.dtype if tensor.kind == WEIGHT else "float32"
            pieces = partial(target.stored_as, tensor.slot, tensor.kind, files)
            begin = stream.bytes
            writing.save(NewTensor(dtype, tensor.region.shape, pieces), stream, "archive", files)
            region = tensor.region
            items.append(
                NewItem(
                    tensor.front + region.name,
                    name,
                    begin,
                    stream.bytes - begin,
                    dtype,
                    region.whole_shape,
                    region.offset,
                    region.shape,
                )
            )
        for key, value in _objects(target, rank, files):
            begin = stream.bytes
            writing.save([value], stream, "archive", files)
            items.append(NewItem(key, name, begin, stream.bytes - begin))
    return stream.entry(name), items, digest.hexdigest() if target.has_integrity else ""


def write_rest(
    target: TargetCheckpoint, folder: Path, items: list[NewItem], digests: Mapping[str, str]
) -> list[FileEntry]:
    """Write the files of the whole checkpoint: the index, the common state of all ranks, the name of the
    format.

    Args:
        target: the checkpoint to write.
        folder: of the files.
        items: of all ranks.
        digests: the SHA-256 of the ranks' files, by name, where the framework wants them.
    """
    with Files() as files:
        body = target.model_state(target.sizes.ranks[0], files)
        chunks = target.views[target.sizes.ranks[0]].chunks
        common = {key: value for key, value in body.items() if key not in chunks and key != "rng_state"}
        if (saved := common.get("optimizer")) is not None:
            kind = {"param_state_sharding_type": RESHARDABLE}
            common["optimizer"] = (
                {number: {**group_state, **kind} for number, group_state in enumerate(saved)}
                if isinstance(saved, list)
                else {**saved, **kind}
            )
        common["content_metadata"] = dict(_CONTENT)
        with writing.HashedFile(folder / COMMON, folder, lambda count: None) as stream:
            writing.save(common, stream, "common", files)
    entries = [stream.entry(COMMON)]
    for name, content in (
        (sharded_index.NAME, index_content(items)),
        (CONFIG, json.dumps(_CONFIG).encode()),
    ):
        entries.append(_small(folder, name, content))
    if target.has_integrity:
        paths = [entry.path for entry in entries]
        entries.append(_small(folder, dcp.INTEGRITY, dcp.integrity_content(folder, digests, paths)))
    return entries


def _small(folder: Path, name: str, content: bytes) -> FileEntry:
    """Write a small file."""
    disk.replace(folder, name, content)
    return FileEntry(name, len(content), xxhash.xxh3_128_hexdigest(content))


def _tensors(target: TargetCheckpoint, rank: Rank) -> Iterator[_Tensor]:
    for slot in target.own(rank):
        if not slot.item.dtype:
            continue
        kinds = [("", WEIGHT)]
        if slot.is_param and not target.source.weights_only:
            kinds += [(f"{STATE}{kind}.", kind) for kind in STATES]
        for front, kind in kinds:
            for part, region in _parts(target, slot):
                yield _Tensor(part, front, kind, region)


def _parts(target: TargetCheckpoint, slot: Slot) -> Iterator[tuple[Slot, ShardedRegion]]:
    """Yield the pieces of a rank's tensor, each as a slot."""
    item = slot.item
    whole_lengths = list(item.shape)
    if item.cut.rows:
        whole_lengths[item.cut.axis or 0] = target.rows
    place = _place(target, item.name, target.key(item.name))
    found_regions = sharded_names.regions(place, tuple(whole_lengths), item.cut, slot.pieces, numbered=True)
    if item.cut.axis is None:
        yield slot, found_regions[0]
        return
    for piece, region in zip(slot.pieces, found_regions, strict=True):
        yield replace(slot, shape=region.shape, pieces=(Piece(piece.whole, 0, piece.length),)), region


def _objects(target: TargetCheckpoint, rank: Rank, files: Files) -> Iterator[tuple[str, Any]]:
    for slot in target.own(rank):
        name = slot.item.name
        if not slot.item.dtype and name.endswith(EXTRA_STATE) and rules.layer_of(name) is not None:
            key = _place(target, name, sharded_names.key_of(name, is_local=False)).name()
            yield f"{key}/shard_0_1", slot.item.value
    states = states_of(target.source, rank, files) if target.sizes.replica(rank) == 0 else []
    if states:
        yield f"rng_state/shard_{rank.pp}.{rank.tp}_{target.sizes.pp}.{target.sizes.tp}", states


def _place(target: TargetCheckpoint, name: str, key: str) -> TensorName:
    model = target.source.model
    return TensorName(key, rules.layer_of(name), rules.expert_of(name), len(model.layers), model.experts)


_METADATA, _STORAGE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class NewItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A written item: a chunk of a tensor, or an object, which has no dtype.

    Attributes:
        name: of the whole tensor, or of the object
        file: below the checkpoint's folder
        begin: of its archive in the file, in bytes
        length: of the archive, in bytes
        dtype: by torch's name
        whole: shape of the whole tensor
        offset: of the chunk in the whole tensor
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


def index_content(items: Iterable[NewItem]) -> bytes:
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
