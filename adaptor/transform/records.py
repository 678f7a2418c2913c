"""Records that stand for the content of an archive of torch, of which nothing is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
class StoredTensor:
    """A contiguous tensor in a file: `offset` in bytes from the start of the file."""

    path: Path
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return how many elements it has."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Return its size in bytes."""
        return self.numel * SIZES[self.dtype]


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
