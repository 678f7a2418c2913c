"""The layout of a file of several contents, one behind the other, before the data of its tensors is there.

A data file of `torch.distributed.checkpoint` is such a file: archives of one tensor each, and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch

from adaptor.checkpoint.archive_layout import PAGE, ArchiveLayout, Entry

T = TypeVar("T")


class SequenceLayout(Generic[T]):
    """The layout of a file to which contents are added.

    Attributes: see `FileLayout`; an archive among the contents has several entries.
    """

    def __init__(self) -> None:
        self.reader: Callable[[bytes], object] | None = None
        self.entries: list[Entry[T]] = []
        self.size = 0
        # Each with its begin, and the number of its first entry.
        self._archives: list[tuple[int, int, ArchiveLayout[T] | ArchiveLayout[torch.Tensor]]] = []
        self._gaps: list[tuple[int, int]] = []  # one in front of each
        self._planned: dict[tuple[torch.dtype, torch.Size, tuple[int, ...]], ArchiveLayout[T]] = {}

    def add_bytes(self, content: bytes) -> tuple[int, int]:
        """Add `content`; return its place and its size, in bytes."""
        begin = self.size
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self.entries.append(Entry("", begin, begin, len(content), data))
        self.size += len(content)
        return begin, len(content)

    def add_tensor(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Add a tensor in the host's memory, as torch.save writes it; return place and size, in bytes."""
        return self._add(ArchiveLayout(tensor, lambda storage: None), self.size)

    def add_part(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Add a contiguous part of a tensor in the host's memory, which is not copied; return place and size.

        torch.save would write all memory behind it.
        """
        # A single element may have any step, also where it is contiguous.
        content = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        return self._add(ArchiveLayout(stand_in_for(tensor), lambda storage: content), self.size)

    def add_planned(self, tensor: torch.Tensor, placeholder: T) -> tuple[int, int]:
        """Add a tensor whose data others write; return place and size, in bytes.

        Args:
            tensor: of its shape and dtype, on any device.
            placeholder: what stands in its entry in the place of data.
        """
        alike = tensor.dtype, tensor.shape, tensor.stride()
        if alike not in self._planned:  # most layers of a model have the same ones
            self._planned[alike] = ArchiveLayout(stand_in_for(tensor), lambda storage: placeholder)
        # At a page: see `PAGE`.
        return self._add(self._planned[alike], self.size + -self.size % PAGE, placeholder)

    def add_archive(self, archive: ArchiveLayout[T]) -> tuple[int, int]:
        """Add an archive with tensors, some of which others write; return place and size, in bytes."""
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
            self.entries.append(
                Entry(
                    archive_entry.name,
                    begin + archive_entry.header,
                    begin + archive_entry.begin,
                    archive_entry.size,
                    content,
                )
            )
        self._gaps.append((self.size, begin - self.size))
        self.size = begin + archive.size
        return begin, archive.size

    def around(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield what stands around the data, with its place.

        Args:
            crcs: the CRC-32 of each entry, in order.
        """
        at, data = 0, b""
        for begin, piece in self._around(crcs):
            if begin != at + len(data):  # what follows each other is one piece
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


def stand_in_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same shape in host memory that is allocated and never written.

    Args:
        tensor: contiguous, on any device.
    """
    make: Any = torch.UntypedStorage  # torch.empty would fill its memory where a job is deterministic
    storage = make(tensor.numel() * tensor.dtype.itemsize)
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())
