"""Records of the content of an archive of torch, without making tensors and objects."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

# Bytes of an element.
SIZES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class DType:
    """A dtype of torch, by its name."""

    name: str


@dataclass(frozen=True)
class Archive:
    """An archive of torch inside of a file: its beginning and length, in bytes."""

    path: Path
    begin: int
    length: int


@dataclass(frozen=True)
class Stretch:
    """Bytes of one tensor of an archive: `offset` from the first byte of the tensor."""

    archive: Archive
    offset: int
    bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous tensor in a file: `offset` in bytes from the start of the file."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def paths(self) -> frozenset[Path]:
        """Return the files with the tensor's bytes."""
        return frozenset({self.path})

    def part(self, begin: int, shape: tuple[int, ...]) -> StoredTensor:
        """Return the tensor of this `shape` from element `begin` on."""
        return replace(self, offset=self.offset + begin * SIZES[self.dtype], shape=shape)

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * SIZES[self.dtype]


@dataclass(frozen=True)
class ScatteredTensor(StoredTensor):
    """A tensor whose bytes lie in several archives of torch, in this order; `path` is the file of the first.

    Attributes:
        stretches: the parts of the tensor; `offset` is the place of its first byte in all parts together
    """

    stretches: tuple[Stretch, ...] = ()

    @cached_property
    def _begins(self) -> list[int]:
        return [0, *accumulate(stretch.bytes for stretch in self.stretches)]

    def within(self, offset: int, count: int) -> Iterator[Stretch]:
        """Yield the stretches of `count` bytes, `offset` bytes from the start of the tensor."""
        offset += self.offset
        number = bisect_right(self._begins, offset) - 1
        while count > 0:
            stretch, inside = self.stretches[number], offset - self._begins[number]
            length = min(count, stretch.bytes - inside)
            if length:
                yield Stretch(stretch.archive, stretch.offset + inside, length)
            number, offset, count = number + 1, offset + length, count - length

    @property
    def paths(self) -> frozenset[Path]:
        """Return the files with the tensor's bytes."""
        return frozenset(stretch.archive.path for stretch in self.within(0, self.bytes))


@dataclass(eq=False)
class NewTensor:
    """A tensor to be written: its bytes come in pieces, each valid until the next."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | bytearray | memoryview]]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Name:
    """The name of a class or function in a pickle; the name is neither looked up nor imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Described:
    """The description of an object that is not made.

    Attributes:
        source: the class or function that makes the object
        arguments: of the class or function
        is_new: `__new__` makes the object; False: a call
        state: that the object gets
    """

    source: Name
    arguments: tuple[Any, ...]
    is_new: bool
    state: Any = None


@dataclass(frozen=True)
class ItemKey:
    """The key of an item in the index of a sharded checkpoint (`MetadataIndex`); an object has no offset."""

    name: str
    offset: tuple[int, ...] | None
