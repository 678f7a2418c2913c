"""Records that stand for the content of an archive of torch, of which nothing is made."""

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
    """An archive of torch in a part of a file: where it begins, and how long it is, in bytes."""

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
        """Return the files that it is in."""
        return frozenset({self.path})

    def part(self, begin: int, shape: tuple[int, ...]) -> StoredTensor:
        """Return the tensor of this `shape` that begins at element `begin`."""
        return replace(self, offset=self.offset + begin * SIZES[self.dtype], shape=shape)

    @property
    def numel(self) -> int:
        """Return how many elements it has."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * SIZES[self.dtype]


@dataclass(frozen=True)
class ScatteredTensor(StoredTensor):
    """A tensor whose bytes are in several archives of torch, in this order; `path` is the file of the first.

    Attributes:
        stretches: that it is made of; `offset` is that of its first byte in all of them together
    """

    stretches: tuple[Stretch, ...] = ()

    @cached_property
    def _begins(self) -> list[int]:
        return [0, *accumulate(stretch.bytes for stretch in self.stretches)]

    def within(self, offset: int, count: int) -> Iterator[Stretch]:
        """Yield the stretches of so many bytes, `offset` bytes from the start of the tensor."""
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
        """Return the files that it is in."""
        return frozenset(stretch.archive.path for stretch in self.within(0, self.bytes))


@dataclass(eq=False)
class NewTensor:
    """A tensor that is to be written: its bytes come in pieces, each of which is good until the next one."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | bytearray | memoryview]]

    @property
    def numel(self) -> int:
        """Return how many elements it has."""
        return prod(self.shape)


@dataclass(frozen=True)
class Name:
    """A class or function, by its name in a pickle: it is neither looked up nor imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass
class Described:
    """An object that is not made: the class or function it comes from, what that is given, its state.

    Attributes:
        is_new: it is made by `__new__`, else by a call
    """

    what: Name
    given: tuple[Any, ...]
    is_new: bool
    state: Any = None


@dataclass
class StoredArray:
    """An array or scalar of numpy: its dtype as numpy writes it (`<u4`), its shape, its bytes."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""
    is_scalar: bool = False

    def loaded(self) -> Any:
        """Return it as numpy has it."""
        import numpy

        array = numpy.frombuffer(self.data, self.dtype).reshape(self.shape).copy()
        return array[()] if self.is_scalar else array


@dataclass(frozen=True)
class ItemKey:
    """The key of an item in the index of a sharded checkpoint: a `MetadataIndex`; no offset: an object."""

    name: str
    offset: tuple[int, ...] | None
