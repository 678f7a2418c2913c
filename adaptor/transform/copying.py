"""Reads parts of whole tensors from the files of one layout, in the order of another, piece by piece.

Compares main params with weights, too: the optimizer's params, rounded, are the weights bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy

from adaptor.errors import CheckpointError
from adaptor.transform import archive as archives
from adaptor.transform.model import Slot
from adaptor.transform.records import SIZES, Archive, ScatteredTensor, StoredTensor
from adaptor.transform.source import StoredPart, needed, one_of_each, pieces_of

# Elements of a piece: 1 MiB of float32 stays in the cache until the piece is hashed and written. By elements,
# because main params and weights are compared piece by piece.
_PIECE = 1 << 18


class Files:
    """The files of the source, each opened once."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._begins: dict[Archive, int] = {}

    def read(self, stored: StoredTensor, offset: int, into: memoryview) -> None:
        """Read bytes of a stored tensor into memory.

        Args:
            stored: the tensor.
            offset: in the tensor, in bytes.
            into: the memory, filled whole.

        Raises:
            CheckpointError: the file ends too early, or is damaged.
        """
        if not isinstance(stored, ScatteredTensor):
            self._read(stored.path, stored.offset + offset, into)
            return
        for stretch in stored.within(offset, len(into)):
            archive = stretch.archive
            self._read(archive.path, self._begin(archive) + stretch.offset, into[: stretch.bytes])
            into = into[stretch.bytes :]

    def _begin(self, archive: Archive) -> int:
        """Return where the only tensor of an archive begins in its file."""
        begin = self._begins.get(archive)
        if begin is None:
            begin = self._begins[archive] = archives.only_tensor(archive).offset
        return begin

    def _read(self, path: Path, offset: int, into: memoryview) -> None:
        try:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while into:
                count = os.preadv(descriptor, [into[: 1 << 30]], offset)
                if not count:
                    raise CheckpointError(f"{path}: ends before byte {offset}")
                offset += count
                into = into[count:]
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def pieces(self, stored: StoredTensor) -> Iterator[memoryview]:
        """Yield the bytes of a stored tensor; each piece is valid until the next."""
        yield from self._stretch(stored, 0, stored.bytes, _PIECE * SIZES[stored.dtype])

    def _stretch(self, stored: StoredTensor, offset: int, count: int, at_once: int) -> Iterator[memoryview]:
        memory = memoryview(bytearray(min(count, at_once)))
        for start in range(0, count, at_once):
            piece = memory[: min(at_once, count - start)]
            self.read(stored, offset + start, piece)
            yield piece

    def whole(self, stored: StoredTensor) -> bytes:
        """Return the bytes of a stored tensor."""
        return b"".join(self.pieces(stored))

    def part(self, slot: Slot, parts: Sequence[StoredPart], *, moments: bool) -> Iterator[memoryview]:
        """Yield the bytes of a rank's tensor; each piece is valid until the next.

        Rows of a padded vocabulary that the source lacks take the value of its last row, as in Megatron's own
        converter; new rows of moments are zero. For each kind of tensor the pieces have the same numbers of
        elements.

        Args:
            slot: the rank's tensor.
            parts: of all ranks of the source.
            moments: the tensor is a moment of Adam.
        """
        parts = one_of_each(slot, parts)
        wanted_parts = sorted(needed(slot, parts), key=lambda wanted_part: wanted_part[2])
        shape, axis = slot.shape, slot.item.cut.axis or 0
        item = SIZES[parts[0].stored.dtype]
        inner = prod(shape[axis + 1 :]) * item
        if axis:
            yield from self._columns(shape, axis, inner, item, wanted_parts)
            return
        for part, source_begin, _, length in wanted_parts:
            yield from self._stretch(part.stored, source_begin * inner, length * inner, _PIECE * item)
        if slot.item.cut.rows:
            yield from self._new_rows(slot, parts[-1], moments)

    def _columns(
        self,
        shape: tuple[int, ...],
        axis: int,
        inner: int,
        item: int,
        wanted_parts: Sequence[tuple[StoredPart, int, int, int]],
    ) -> Iterator[memoryview]:
        outer, row = prod(shape[:axis]), shape[axis] * inner
        at_once = max(1, _PIECE * item // max(1, row))
        row_block = numpy.empty((min(at_once, outer), row), numpy.uint8)
        for start in range(0, outer, at_once):
            count = min(at_once, outer - start)
            for part, source_begin, own_begin, length in wanted_parts:
                source_row = part.stored.shape[axis] * inner
                block = numpy.empty((count, source_row), numpy.uint8)
                self.read(part.stored, start * source_row, _flat(block))
                row_block[:count, own_begin * inner : (own_begin + length) * inner] = block[
                    :, source_begin * inner : (source_begin + length) * inner
                ]
            yield _flat(row_block[:count])

    def _new_rows(self, slot: Slot, part: StoredPart, moments: bool) -> Iterator[memoryview]:
        """Yield the rows behind the last row of the source, which `part` has."""
        last = part.stored
        rows = slot.item.shape[0]
        own_pieces = pieces_of(0, slot.pieces, slot.shape)
        new = sum(min(piece.length, max(0, piece.whole + piece.length - rows)) for piece in own_pieces)
        if not new:
            return
        width = last.bytes // last.shape[0]
        row = memoryview(bytearray(width))
        if not moments:
            self.read(last, last.bytes - width, row)
        for _ in range(new):
            yield row

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _flat(array: Any) -> memoryview:
    return memoryview(array).cast("B")


Bits = Any  # an array of numpy, of unsigned integers


def rounds_to(main: memoryview, weight: memoryview, dtype: str) -> bool:
    """Return whether main params in float32 round to weights.

    Args:
        main: the bytes of the main params.
        weight: the bytes of as many weights.
        dtype: of the weights: float32, bfloat16 or float16.
    """
    if dtype == "float32":
        return main == weight
    main_bits, weight_bits = numpy.frombuffer(main, numpy.uint32), numpy.frombuffer(weight, numpy.uint16)
    rounded = _bfloat16(main_bits) if dtype == "bfloat16" else _float16(main_bits)
    is_equal = rounded == weight_bits
    # Not a number has many forms, which are all equal here.
    return bool(is_equal.all()) or bool(
        (is_equal | (_is_nan(main_bits) & _is_nan_16(weight_bits, dtype))).all()
    )


def _bfloat16(bits: Bits) -> Bits:
    """Round to the nearest; between two equally near values to the even one."""
    rounded = bits >> numpy.uint32(16)
    rounded &= numpy.uint32(1)
    rounded += numpy.uint32(0x7FFF)
    rounded += bits
    rounded >>= numpy.uint32(16)
    return rounded.astype(numpy.uint16)


def _float16(bits: Bits) -> Bits:
    with numpy.errstate(over="ignore"):
        return bits.view(numpy.float32).astype(numpy.float16).view(numpy.uint16)


def _is_nan(bits: Bits) -> Bits:
    return numpy.isnan(bits.view(numpy.float32))


def _is_nan_16(bits: Bits, dtype: str) -> Bits:
    infinite = 0x7F80 if dtype == "bfloat16" else 0x7C00
    return (bits & 0x7FFF) > infinite
