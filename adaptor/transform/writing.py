"""Writes archives of torch front to back in one pass, hashed on the way, without torch and whole tensors.

The content has a record in the place of each tensor: a new tensor (`NewTensor`), or a tensor of the source,
which is copied. A tensor's bytes come in pieces that fit into the cache of a core.

The zip file is written here, not by the standard library, whose CRC-32 takes too much time.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from adaptor.checkpoint import disk
from adaptor.checkpoint.hashing import Digests, crc32
from adaptor.protocol.naming import FileEntry
from adaptor.transform.copying import Files
from adaptor.transform.pickles import STORAGES
from adaptor.transform.records import (
    SIZES,
    Described,
    DType,
    ItemKey,
    Name,
    NewTensor,
    ScatteredTensor,
    StoredArray,
    StoredTensor,
)

# Smaller writes are gathered, so that the system is not called for each bias; in bytes.
_SMALL, _GATHERED = 64 << 10, 1 << 20
# After each so many bytes the system is told to begin to write to the disk, without waiting.
_BEGIN_TO_WRITE = 32 << 20


class HashedFile:
    """A file that is written front to back and hashed: the file is on disk when it is closed without an
    error.
    """

    def __init__(self, path: Path, base_folder: Path, progress: Callable[[int], None]) -> None:
        self._descriptor = disk.create(base_folder, path.relative_to(base_folder).as_posix())
        self._digests = Digests()
        self.bytes = 0
        self._progress = progress
        self._gathered = bytearray()
        self._begun_bytes = 0
        self._updates: list[Callable[[memoryview], object]] = []

    def also(self, update: Callable[[memoryview], object]) -> None:
        """Pass all bytes written from now on to `update` of another digest."""
        self._updates.append(update)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data`; return its size in bytes. Raises OSError."""
        count = len(data)
        self.bytes += count
        if count < _SMALL:
            self._gathered += data
            if len(self._gathered) >= _GATHERED:
                self.flush()
            return count
        self.flush()
        self._write(memoryview(data))
        return count

    def flush(self) -> None:
        """Write the gathered bytes to the file."""
        if self._gathered:
            data, self._gathered = self._gathered, bytearray()
            self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        self._digests.update(data)
        for update in self._updates:
            update(data)
        while data:
            count = os.write(self._descriptor, data)
            data = data[count:]
            self._progress(count)
        length = self.bytes - self._begun_bytes
        if length >= _BEGIN_TO_WRITE:
            disk.begin_to_write(self._descriptor, self._begun_bytes, length)
            self._begun_bytes = self.bytes

    def entry(self, name: str) -> FileEntry:
        """Return the entry of the manifest, under `name`; call after the file is closed."""
        return self._digests.entry(name)

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.flush()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def described(name: str, state: Any, module: str = "torch.distributed.checkpoint.metadata") -> Described:
    """Return the description of an object that `__new__` makes and that then gets a state.

    Args:
        name: of its class.
        state: of the object.
        module: of the class.
    """
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

    def _save_array(self, array: StoredArray) -> None:
        self.save(array.loaded())

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
    dispatch[StoredArray] = _save_array
    dispatch[Described] = _save_described
    dispatch[ItemKey] = _save_item_key
    dispatch[NewTensor] = _save_tensor
    dispatch[StoredTensor] = _save_tensor
    dispatch[ScatteredTensor] = _save_tensor


_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


def save(value: Any, stream: HashedFile, root: str, files: Files) -> None:
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


_ALIGNMENT = 64  # of the data of a file, as torch has it, in bytes
# Members of more bytes, or that begin behind so many, have their numbers in fields of ZIP64.
_LIMIT = (1 << 31) - 1
_ELSEWHERE, _ELSEWHERE_16 = 0xFFFFFFFF, 0xFFFF
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_END_64, _LOCATOR_64 = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_SIZES_64 = struct.Struct("<2H2Q")
_BEHIND = 0x08  # flag: checksum and sizes stand behind the data
_VERSION, _VERSION_64 = 20, 45
_DATE = 0x21  # 1980-01-01, the first day that a zip file knows


class ZipWriter:
    """A zip file, whose members are stored uncompressed.

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
        self._directory: list[bytes] = []

    def add(self, name: str, size: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Add a member whose data begins at a multiple of 64 bytes.

        Args:
            name: of printable ASCII.
            size: of its data, in bytes.
            pieces: of the data.

        Raises:
            ValueError: the pieces have another size.
        """
        text, begin = name.encode("ascii"), self._tell() - self._begin
        is_large = size > _LIMIT
        version = _VERSION_64 if is_large else _VERSION
        sizes = _SIZES_64.pack(1, 16, 0, 0) if is_large else b""
        padding = -(begin + _LOCAL.size + len(text) + len(sizes) + 4) % _ALIGNMENT
        extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding + sizes
        size_field = _ELSEWHERE if is_large else 0
        head = (b"PK\3\4", version, _BEHIND, 0, 0, _DATE, 0, size_field, size_field, len(text), len(extra))
        self._write(_LOCAL.pack(*head) + text + extra)
        crc = written = 0
        for piece in pieces:
            crc = crc32(piece, crc)
            written += len(piece)
            self._write(piece)
        if written != size:
            raise ValueError(f"{name}: has {written} bytes, {size} were expected")
        descriptor = _DESCRIPTOR_64 if is_large else _DESCRIPTOR
        self._write(descriptor.pack(b"PK\7\x08", crc, size, size))
        self._directory.append(_entry(text, size, crc, begin))

    def close(self) -> None:
        """Write the directory; nothing may be added afterwards."""
        begin = self._tell() - self._begin
        directory, count = b"".join(self._directory), len(self._directory)
        size, end = len(directory), b""
        if count > _ELSEWHERE_16 - 1 or begin > _LIMIT or size > _LIMIT:
            end = _END_64.pack(b"PK\6\6", 44, _VERSION_64, _VERSION_64, 0, 0, count, count, size, begin)
            end += _LOCATOR_64.pack(b"PK\6\7", 0, begin + size, 1)
        number = min(count, _ELSEWHERE_16)
        end += _END.pack(b"PK\5\6", 0, 0, number, number, min(size, _ELSEWHERE), min(begin, _ELSEWHERE), 0)
        self._write(directory + end)


def _entry(name: bytes, size: int, crc: int, begin: int) -> bytes:
    """Return the entry of a file in the directory."""
    large = [size, size] if size > _LIMIT else []
    if begin > _LIMIT:
        large.append(begin)
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _VERSION_64 if large else _VERSION
    size_field = _ELSEWHERE if size > _LIMIT else size
    place = _ELSEWHERE if begin > _LIMIT else begin
    head = (
        b"PK\1\2",
        version,
        version,
        _BEHIND,
        0,
        0,
        _DATE,
        crc,
        size_field,
        size_field,
        len(name),
        len(extra),
    )
    return _CENTRAL.pack(*head, 0, 0, 0, 0, place) + name + extra
