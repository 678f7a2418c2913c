"""The layout of a file of torch before its data exists: the place of each tensor, and the bytes around the
tensors.

torch's files are zip archives whose entries are stored uncompressed. Once the value is pickled, with a
reference to an entry in place of each tensor, the place of every byte is known, and several processes may
write the entries in any order. Only the CRC-32 of each entry comes later, in the headers, which are written
last.

`ArchiveLayout` lays out one archive; `SequenceLayout` a file of several contents, one behind the other, such
as a data file of `torch.distributed.checkpoint`: archives of one tensor each, and bytes.

`mapped` reads tensors from just-checked files, mapped from the memory of the node, not read once more. The
check before a resume has read each byte of a checkpoint, so the files are in the page cache. `torch.load`
would copy the data into new memory, and the framework would copy them once more to their place. Mapped
storages are the pages themselves, and the framework's copy is the only copy.

The pages are private: a write to a mapped tensor never reaches the file. Small storages are read normally,
because a framework may keep small storages (random states) for as long as it runs, and with them the file.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from adaptor import context
from adaptor.checkpoint import zip_members
from adaptor.checkpoint.divided_reading import CheckedFiles
from adaptor.checkpoint.hashing import crc32

T = TypeVar("T")

_ROOT = "archive"  # torch's name without a file name
PAGE = 4096  # of storages that other ranks write: a shared storage is cut at a page at most
_CRC_POLYNOMIAL = 0xEDB88320
_SMALL = 1 << 20  # of a storage that is not mapped, in bytes


@dataclass(frozen=True)
class ArchiveEntry(Generic[T]):
    """A storage in the archive: `begin` and `size` of its data, in bytes.

    `content`: the data, of bytes; or the caller's description of a tensor whose data other ranks write.
    """

    begin: int
    size: int
    content: torch.Tensor | T


class ArchiveLayout(Generic[T]):
    """The layout of the archive that `torch.load` reads as `value`.

    `planned` returns the description of a storage that other ranks write, None for a storage with data.
    `structure` is the pickled value, with references in place of tensors.
    """

    def __init__(self, value: Any, planned: Callable[[torch.UntypedStorage], T | None]) -> None:
        pickled = io.BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(value)
        self.structure = pickled.getvalue()
        self.entries: list[ArchiveEntry[T]] = []
        self.reader: Callable[[bytes], object] | None = None
        # Each with the begin of its data; and with the content where the layout knows the content already.
        self._members: list[tuple[zipfile.ZipInfo, int, bytes | None]] = []
        self._end = 0
        self._fix("data.pkl", self.structure)
        self._fix("byteorder", b"little")
        self._fix("version", b"3\n")
        for key, storage in enumerate(pickler.storages.values()):
            planned_range = planned(storage)
            if planned_range is None:
                content = _content(storage)
                self._add(f"data/{key}", content, zip_members.ALIGNMENT, content.numel())
            else:
                self._add(f"data/{key}", planned_range, PAGE, storage.nbytes())
        members = [member for member, _, _ in self._members]
        self.size = self._end + len(zip_members.directory(members, self._end))

    def _fix(self, name: str, content: bytes) -> None:
        self._place(name, zip_members.ALIGNMENT, len(content), content)

    def _add(self, name: str, content: torch.Tensor | T, alignment: int, size: int) -> None:
        self.entries.append(ArchiveEntry(self._place(name, alignment, size, None), size, content))

    def _place(self, name: str, alignment: int, size: int, content: bytes | None) -> int:
        member, begin = zip_members.place(f"{_ROOT}/{name}", self._end, size, alignment)
        self._members.append((member, begin, content))
        self._end = begin + size
        return begin

    def around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the bytes around the data, each with its place, from the CRC-32 of each entry in order."""
        crc_iterator = iter(crcs)
        members = []
        at, data = 0, b""
        for placed, begin, content in self._members:
            crc = crc32(content, 0) if content is not None else next(crc_iterator)
            member = zip_members.copy_of(placed, crc, placed.extra)  # the layout may be of several archives
            members.append(member)
            data += member.FileHeader()
            if content is not None:
                data += content
            else:
                yield at, data
                at, data = begin + member.file_size, b""
        yield at, data + zip_members.directory(members, self._end)


class _Pickler(pickle.Pickler):
    """Pickles as torch.save does: a storage is a reference, by the number of the entry with its data."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.storages: dict[int, torch.UntypedStorage] = {}
        self._numbers: dict[int, str] = {}

    def persistent_id(self, thing: Any) -> Any:
        storage: Any = thing
        if isinstance(thing, torch.storage.TypedStorage):
            typed: Any = thing
            storage, numel = typed._untyped_storage, typed._size()
            kind = getattr(torch, typed._pickle_storage_type())
        elif torch.is_storage(thing):
            kind, numel = torch.UntypedStorage, storage.nbytes()
        else:
            return None
        number = self._numbers.setdefault(storage._cdata, str(len(self._numbers)))
        self.storages[storage._cdata] = storage
        return ("storage", kind, number, torch.serialization.location_tag(storage), numel)


def _content(storage: Any) -> torch.Tensor:
    on_host = storage if storage.device.type == "cpu" else storage.cpu()
    return torch.empty(0, dtype=torch.uint8).set_(on_host)


def join_crcs(parts: Sequence[tuple[int, int]]) -> int:
    """Return the CRC-32 of a whole from the CRC-32 and the size in bytes of each part, in order."""
    joined = 0
    for crc, size in parts:
        joined = (_multiply(_power(size), joined) if joined else 0) ^ crc
    return joined


@functools.lru_cache(1024)
def _power(count: int) -> int:
    """Return x to the power of 8 * `count` modulo the polynomial: the effect of zero bytes on a CRC."""
    result, square = 1 << 31, 1 << 23
    while count:
        if count & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        count >>= 1
    return result


def _multiply(first: int, second: int) -> int:
    """Multiply polynomials over the field of two elements, whose highest bit has the power 0."""
    product, bit = 0, 1 << 31
    while bit:
        if first & bit:
            product ^= second
        second = second >> 1 ^ (_CRC_POLYNOMIAL if second & 1 else 0)
        bit >>= 1
    return product


class SequenceLayout(Generic[T]):
    """The layout of a file to which contents are added; an archive among them has several entries."""

    def __init__(self) -> None:
        self.reader: Callable[[bytes], object] | None = None
        self.entries: list[ArchiveEntry[T]] = []
        self.size = 0
        # Each with its begin, and the number of its first entry.
        self._archives: list[tuple[int, int, ArchiveLayout[T] | ArchiveLayout[torch.Tensor]]] = []
        self._gaps: list[tuple[int, int]] = []  # a gap in front of each
        self._planned: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], ArchiveLayout[T]] = {}

    def add_bytes(self, content: bytes) -> tuple[int, int]:
        """Add `content`; return its place and its size, in bytes."""
        begin = self.size
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.entries.append(ArchiveEntry(begin, len(content), data))
        self.size += len(content)
        return begin, len(content)

    def add_tensor(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Add a tensor in the host's memory, as torch.save writes it; return place and size, in bytes."""
        return self._add(ArchiveLayout(tensor, lambda storage: None), self.size)

    def add_part(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Add a contiguous part of a host tensor, without the memory behind it; return place and size."""
        # A single element may have any step, also where it is contiguous.
        content = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return self._add(ArchiveLayout(stand_in_for(tensor), lambda storage: content), self.size)

    def add_planned(self, tensor: torch.Tensor, placeholder: T) -> tuple[int, int]:
        """Add a tensor whose data other ranks write, with a `placeholder`; return place and size."""
        alike = tensor.dtype, tensor.shape, tensor.stride()
        if alike not in self._planned:  # most layers of a model have equal tensors
            self._planned[alike] = ArchiveLayout(stand_in_for(tensor), lambda storage: placeholder)
        # At a page: see `PAGE`.
        return self._add(self._planned[alike], self.size + -self.size % PAGE, placeholder)

    def add_archive(self, archive: ArchiveLayout[T]) -> tuple[int, int]:
        """Add an archive with tensors, some of which other ranks write; return place and size, in bytes."""
        return self._add(archive, self.size + -self.size % PAGE)

    def _add(
        self,
        archive: ArchiveLayout[T] | ArchiveLayout[torch.Tensor],
        begin: int,
        placeholder: T | None = None,
    ) -> tuple[int, int]:
        self._archives.append((begin, len(self.entries), archive))
        for archive_entry in archive.entries:
            content = archive_entry.content if placeholder is None else placeholder
            self.entries.append(ArchiveEntry(begin + archive_entry.begin, archive_entry.size, content))
        self._gaps.append((self.size, begin - self.size))
        self.size = begin + archive.size
        return begin, archive.size

    def around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """See `ArchiveLayout.around`."""
        at, data = 0, b""
        for begin, piece in self._around(crcs):
            if begin != at + len(data):  # adjacent pieces are joined
                if data:
                    yield at, data
                at, data = begin, b""
            data += piece
        if data:
            yield at, data

    def _around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        for (gap, count), (begin, first, archive) in zip(self._gaps, self._archives, strict=True):
            yield gap, bytes(count)
            for at, data in archive.around(crcs[first : first + len(archive.entries)]):
                yield begin + at, data


# The layout of a file: the place of each content, and the bytes that are written last.
FileLayout = ArchiveLayout[T] | SequenceLayout[T]


def stand_in_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor of the same shape in host memory that is allocated and never written."""
    make: Any = torch.UntypedStorage  # torch.empty would fill its memory where a job is deterministic
    storage = make(tensor.numel() * tensor.dtype.itemsize)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


class _MappedArchive(torch._C.PyTorchFileReader):
    """An archive of torch whose large storages are mapped."""

    def __init__(self, file: Any, whole_storage: torch.UntypedStorage, begin: int) -> None:
        """Open the archive.

        Args:
            whole_storage: the mapped file around the archive.
            begin: the offset of the archive's first byte in the mapped file.
        """
        super().__init__(file)
        self._whole, self._begin = whole_storage, begin

    def get_storage_from_record(self, name: str, size: int, kind: Any) -> torch.Tensor:
        """Return the storage of a record, in a tensor, as the archive of torch does.

        In the format `torch_dist` a storage begins at any byte of the file. The alignment does no harm: the
        tensor is only copied from, and torch copies from any address (as for safetensors, always mapped
        without alignment).
        """
        first = self._begin + self.get_record_offset(name)  # type: ignore[attr-defined]
        if size < _SMALL or first + size > self._whole.nbytes():
            return super().get_storage_from_record(name, size, kind)
        return torch.empty(0, dtype=torch.uint8).set_(self._whole[first : first + size])


def mapped(file: Any) -> torch._C.PyTorchFileReader | None:
    """Return an archive of torch with mapped storages; None if `file` was not checked.

    Args:
        file: the input of `torch.load`: an open file, or a part of a file (`torch.distributed.checkpoint`).
    """
    whole_file, begin = getattr(file, "base_stream", file), getattr(file, "offset", 0)
    name = getattr(whole_file, "name", None)
    if not isinstance(name, str) or name not in context.part(CheckedFiles):
        return None
    descriptor = whole_file.fileno()
    try:
        # By the descriptor: it is the file that is open, whatever its name means by now.
        path, size = f"/proc/self/fd/{descriptor}", os.fstat(descriptor).st_size
        whole_storage: Any = torch.UntypedStorage.from_file(path, False, size)
    except RuntimeError:  # a file system that maps nothing
        return None
    return _MappedArchive(file, whole_storage, begin)
