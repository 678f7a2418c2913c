"""Writes the files of a target front to back in one pass, hashed on the way, without torch and whole tensors.

The content has a record in the place of each tensor: a new tensor (`NewTensor`), or a tensor of the source,
which is copied. A tensor's bytes come in pieces that fit into the cache of a core.

A checkpoint of the format `torch_dist` has one data file for each model-parallel rank of the target. The
optimizer's state is written as `fully_reshardable`: a tensor for each param, in its shape, which Megatron-LM
loads in any parallel sizes. State that ranks share is in the file of the first rank that has it.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import xxhash

from adaptor.checkpoint import dcp, disk, zip_members
from adaptor.checkpoint.hashing import HashingFile, crc32
from adaptor.checkpoint.layout_file import Piece
from adaptor.protocol.naming import FileEntry
from adaptor.transform import rules, sharded_index
from adaptor.transform.archive import STORAGES
from adaptor.transform.copying import Files, states_of
from adaptor.transform.described import STATES
from adaptor.transform.model import Slot
from adaptor.transform.records import (
    SIZES,
    Described,
    DType,
    ItemKey,
    Name,
    NewTensor,
    ScatteredTensor,
    StoredTensor,
)
from adaptor.transform.sharded_index import EXTRA_STATE, STATE, ShardedRegion, TensorName
from adaptor.transform.sharded_source import COMMON, CONFIG, RESHARDABLE
from adaptor.transform.sizes import Rank
from adaptor.transform.source import WEIGHT
from adaptor.transform.target import TargetCheckpoint

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
# Of a zip archive.
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4s3I"), struct.Struct("<4sI2Q")
_BEHIND = 0x08  # flag: checksum and sizes stand behind the data
# The modules of the classes in the index of a sharded checkpoint.
_METADATA, _STORAGE = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
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
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


def described(name: str, state: Any, module: str = _METADATA) -> Described:
    """Return the description of an object of a class, which `__new__` makes and which then gets a state."""
    return Described(Name(module, name), (), is_new=True, state=state)


def size(lengths: Sequence[int]) -> Described:
    """Return the description of a torch.Size."""
    return Described(Name("torch", "Size"), (tuple(lengths),), is_new=False)


def structure(value: Any) -> bytes:
    """Return the pickle of a value without tensors."""
    text = io.BytesIO()
    _RecordPickler(text).dump(value)
    return text.getvalue()


# The pickler in C can write only classes that can be imported; the one in Python has no types.
_Base: Any = pickle._Pickler


class _RecordPickler(_Base):  # type: ignore[misc]
    """Writes records as the objects that they describe; collects the tensors, in the order of their keys."""

    dispatch: ClassVar[dict[type, Any]] = dict(_Base.dispatch)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[NewTensor | StoredTensor] = []

    def _save_name(self, name: Name) -> None:
        self.write(pickle.GLOBAL + f"{name.module}\n{name.name}\n".encode())

    def _save_dtype(self, dtype: DType) -> None:
        self._save_name(Name("torch", dtype.name))

    def _save_described(self, described: Described) -> None:
        self.save(described.source)
        self.save(described.arguments)
        self.write(pickle.NEWOBJ if described.is_new else pickle.REDUCE)
        self.memoize(described)
        if described.state is not None:
            self.save(described.state)
            self.write(pickle.BUILD)

    def _save_item_key(self, key: ItemKey) -> None:
        offset = None if key.offset is None else size(key.offset)
        self.save(described("MetadataIndex", {"fqn": key.name, "offset": offset, "index": None}))

    def _save_tensor(self, tensor: NewTensor | StoredTensor) -> None:
        self._save_name(Name("torch._utils", "_rebuild_tensor_v2"))
        self.write(pickle.MARK)
        kind = Name("torch", _STORAGE_OF[tensor.dtype])
        self.save(("storage", kind, str(len(self.tensors)), "cpu", tensor.numel))
        self.write(pickle.BINPERSID)
        self.save(0)
        self.save(tensor.shape)
        self.save(_strides(tensor.shape))
        self.save(False)
        self.save(OrderedDict())
        self.write(pickle.TUPLE + pickle.REDUCE)
        self.memoize(tensor)
        self.tensors.append(tensor)

    dispatch[Name] = _save_name
    dispatch[DType] = _save_dtype
    dispatch[Described] = _save_described
    dispatch[ItemKey] = _save_item_key
    dispatch[NewTensor] = _save_tensor
    dispatch[StoredTensor] = _save_tensor
    dispatch[ScatteredTensor] = _save_tensor


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def save(value: Any, stream: HashingFile, root: str, files: Files) -> None:
    """Write `value` as an archive that torch loads.

    Args:
        value: the content, with records.
        stream: the file.
        root: the name of the archive inside of the file.
        files: of the source, for copied tensors.

    Raises:
        OSError: the disk refuses.
        CheckpointError: a file of the source ends too early.
    """
    structure = io.BytesIO()
    pickler = _RecordPickler(structure)
    pickler.dump(value)
    content = structure.getvalue()
    archive = ZipWriter(stream.write, lambda: stream.bytes)
    for name, text in (("data.pkl", content), ("byteorder", b"little"), ("version", b"3\n")):
        archive.add(f"{root}/{name}", len(text), [text])
    for key, tensor in enumerate(pickler.tensors):
        pieces = tensor.pieces() if isinstance(tensor, NewTensor) else files.pieces(tensor)
        archive.add(f"{root}/data/{key}", tensor.numel * SIZES[tensor.dtype], pieces)
    archive.close()


class ZipWriter:
    """A zip file, whose members are written front to back: their checksums stand behind the data.

    Args:
        write: writes the next bytes of the file.
        tell: returns the number of written bytes.
    """

    def __init__(
        self, write: Callable[[bytes | bytearray | memoryview], object], tell: Callable[[], int]
    ) -> None:
        self._write = write
        self._tell = tell
        self._begin = tell()
        self._members: list[zipfile.ZipInfo] = []

    def add(self, name: str, size: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Add a member whose data begins at a multiple of 64 bytes.

        Args:
            name: of printable ASCII.
            size: of its data, in bytes.
            pieces: of the data.

        Raises:
            ValueError: the pieces have another size.
        """
        member, _ = zip_members.place(name, self._tell() - self._begin, size)
        member.flag_bits = _BEHIND
        is_large = size > zipfile.ZIP64_LIMIT
        self._write(member.FileHeader(zip64=is_large))
        member.CRC = written = 0
        for piece in pieces:
            member.CRC = crc32(piece, member.CRC)
            written += len(piece)
            self._write(piece)
        if written != size:
            raise ValueError(f"{name}: has {written} bytes, {size} were expected")
        descriptor = _DESCRIPTOR_64 if is_large else _DESCRIPTOR
        self._write(descriptor.pack(b"PK\7\x08", member.CRC, size, size))
        self._members.append(member)

    def close(self) -> None:
        """Write the directory; nothing may be added afterwards."""
        self._write(zip_members.directory(self._members, self._tell() - self._begin))


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
    with HashingFile(folder / name, progress) as stream:
        if target.has_integrity:
            stream.also(digest.update)
        for part, front, kind, region in _tensors(target, rank):
            dtype = part.item.dtype if kind == WEIGHT else "float32"
            pieces = partial(target.stored_as, part, kind, files)
            begin = stream.bytes
            save(NewTensor(dtype, region.shape, pieces), stream, "archive", files)
            place = front + region.name, name, begin, stream.bytes - begin
            items.append(NewItem(*place, dtype, region.whole_shape, region.offset, region.shape))
        for key, value in _objects(target, rank, files):
            begin = stream.bytes
            save([value], stream, "archive", files)
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
        with HashingFile(folder / COMMON) as stream:
            save(common, stream, "common", files)
    entries = [stream.entry(COMMON)]
    for name, content in (
        (sharded_index.NAME, index_content(items)),
        (CONFIG, json.dumps(_CONFIG).encode()),
    ):
        entries.append(write_small(folder, name, content))
    if target.has_integrity:
        paths = [entry.path for entry in entries]
        entries.append(write_small(folder, dcp.INTEGRITY, dcp.integrity_content(folder, digests, paths)))
    return entries


def write_small(folder: Path, name: str, content: bytes) -> FileEntry:
    """Write a small file; return its entry in the manifest."""
    disk.replace(folder, name, content)
    return FileEntry(name, len(content), xxhash.xxh3_128_hexdigest(content))


def _tensors(target: TargetCheckpoint, rank: Rank) -> Iterator[tuple[Slot, str, str, ShardedRegion]]:
    """Yield the slot, the prefix of the name, the kind and the region of each part that a rank writes."""
    for slot in target.own(rank):
        if not slot.item.dtype:
            continue
        kinds = [("", WEIGHT)]
        if slot.is_param and not target.source.weights_only:
            kinds += [(f"{STATE}{kind}.", kind) for kind in STATES]
        for front, kind in kinds:
            for part, region in _parts(target, slot):
                yield part, front, kind, region


def _parts(target: TargetCheckpoint, slot: Slot) -> Iterator[tuple[Slot, ShardedRegion]]:
    """Yield the pieces of a rank's tensor, each as a slot."""
    item = slot.item
    whole_lengths = list(item.shape)
    if item.cut.rows:
        whole_lengths[item.cut.axis or 0] = target.rows
    place = _place(target, item.name, target.key(item.name))
    found_regions = sharded_index.regions(place, tuple(whole_lengths), item.cut, slot.pieces, numbered=True)
    if item.cut.axis is None:
        yield slot, found_regions[0]
        return
    for piece, region in zip(slot.pieces, found_regions, strict=True):
        yield replace(slot, shape=region.shape, pieces=(Piece(piece.whole, 0, piece.length),)), region


def _objects(target: TargetCheckpoint, rank: Rank, files: Files) -> Iterator[tuple[str, Any]]:
    for slot in target.own(rank):
        name = slot.item.name
        if not slot.item.dtype and name.endswith(EXTRA_STATE) and rules.layer_of(name) is not None:
            key = _place(target, name, sharded_index.key_of(name, is_local=False)).name()
            yield f"{key}/shard_0_1", slot.item.value
    states = states_of(target.source, rank, files) if target.sizes.replica(rank) == 0 else []
    if states:
        yield f"rng_state/shard_{rank.pp}.{rank.tp}_{target.sizes.pp}.{target.sizes.tp}", states


def _place(target: TargetCheckpoint, name: str, key: str) -> TensorName:
    model = target.source.model
    return TensorName(key, rules.layer_of(name), rules.expert_of(name), len(model.layers), model.experts)


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
        stored[key] = described("_StorageInfo", place, _STORAGE)
    layout = Described(Name("torch.serialization", "_get_layout"), ("torch.strided",), is_new=False)
    memory = Described(Name(_METADATA, "_MEM_FORMAT_ENCODING"), (0,), is_new=False)
    metadata_state: dict[str, Any] = {}
    for name, chunks in tensors.items():
        first = chunks[0]
        if not first.dtype:
            metadata_state[name] = described("BytesStorageMetadata", {})
            continue
        properties = (DType(first.dtype), layout, False, memory, False)
        metadata_state[name] = described(
            "TensorStorageMetadata",
            {
                "properties": described("TensorProperties", properties),
                "size": size(first.whole),
                "chunks": [
                    described(
                        "ChunkStorageMetadata",
                        {"offsets": size(chunk.offset), "sizes": size(chunk.shape)},
                    )
                    for chunk in chunks
                ],
            },
        )
    return structure(
        described(
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
