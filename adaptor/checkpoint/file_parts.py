"""Writes parts of a file in place, hashed on the way: block by block, with the memory of a few blocks.

A part is a stretch of the file whose content this process has. Each part is reported with the CRC-32, for the
header of its entry in the archive, and with the digest of each block of the file (`hashing.BLOCK`) that lies
wholly in the part; blocks with bytes of several parts are hashed when the file is complete. So partial blocks
go through the page cache, for the read, and whole blocks past the cache (`page_cache`). Partial blocks go
first: a write through the page cache locks the file, so it would wait for all direct writes of all ranks
under way, and they for it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from adaptor.checkpoint import shards
from adaptor.checkpoint.hashing import BLOCK, PacedSync, crc32
from adaptor.checkpoint.page_cache import DirectWriter
from adaptor.checkpoint.planned_tensors import StridedView
from adaptor.checkpoint.shards import Exchange, Observer


class Region(msgspec.Struct, frozen=True):
    """The place of elements [`begin`, `end`) of a world tensor: from byte `at` of the file with this number.

    `position`, `number` and `key` name the world tensor (`planned_tensors.Source`), `dtype` is torch's name
    of the written dtype. With a `view` the elements stand in another order (`Source.view`).
    """

    file: int
    at: int
    position: int
    number: int
    key: str
    dtype: str
    begin: int
    end: int
    view: tuple[tuple[int, int], ...] = ()


class WrittenPart(msgspec.Struct, frozen=True):
    """A part in the file: place and size in bytes, CRC-32, and the digests of its whole blocks, joined."""

    file: int
    at: int
    size: int
    crc: int
    digests: bytes


class NotFinite(msgspec.Struct, frozen=True):
    """Elements [`begin`, `end`) of a world tensor, of shard `index`, which are not finite in this dtype."""

    position: int
    number: int
    key: str
    dtype: str
    index: int
    begin: int
    end: int


@dataclass(frozen=True)
class _Stretch:
    """A part to be written; `read` returns its bytes [begin, end), in memory that the next call may use.

    `see` is called with bytes that are written, and with their place in the part.
    """

    file: int
    at: int
    size: int
    read: Callable[[int, int], memoryview]
    see: Callable[[int, memoryview], None] | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if the stretch consists of whole blocks."""
        return self.at % BLOCK == 0 == self.size % BLOCK


def _cut(at: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the cuts of a stretch that separate whole blocks from the rest, in bytes from its begin."""
    first, last = -at % BLOCK, size - (at + size) % BLOCK
    edges = (0, first, last, size) if first < last else (0, size)
    for begin, end in itertools.pairwise(edges):
        if begin < end:
            yield begin, end


# A param of a shard: begin and end in the world tensor, and its tensors by key.
_Piece = tuple[int, int, Mapping[str, torch.Tensor]]


# By shard, the elements on the host of a param that is turned round: its part, begin and end.
_Held = dict[int, tuple["_StridedPart", int, int, torch.Tensor]]


def _extent(piece: _Piece) -> tuple[int, int]:
    return piece[:2]


def _without_gaps(pieces: Sequence[_Piece], begin: int, end: int) -> list[_Piece]:
    """Return the pieces of a shard, which are in order, with pieces of zeros between them."""
    zero = torch.zeros(1, device="cpu")
    edges = [begin, *itertools.chain.from_iterable(map(_extent, pieces)), end]
    gaps = [
        (low, high, dict.fromkeys(shards.KEYS, zero.expand(high - low)))
        for low, high in zip(edges[::2], edges[1::2], strict=True)
        if low < high
    ]
    return sorted([*pieces, *gaps], key=_extent)


def _between(pieces: Sequence[_Piece], begin: int, end: int) -> Sequence[_Piece]:
    """Return the pieces, which are in order, with elements in [`begin`, `end`)."""
    first = bisect.bisect_right(pieces, begin, key=lambda piece: piece[1])
    return pieces[first : bisect.bisect_left(pieces, end, key=lambda piece: piece[0])]


class PartWriter:
    """Writes the parts of one process; a context manager, after whose end no write is under way.

    `files` are descriptors, by the number of the file. `not_finite`: elements in the non-finite `parts`.
    """

    def __init__(self, files: Sequence[int], exchange: Exchange) -> None:
        self._files = files
        self._blocks = _Blocks()
        self._exchange = exchange
        self._stretches: list[_Stretch] = []
        # Not before a block is written: a sync waits for the writes of other ranks to the file, too. And not
        # much later: a slow disk shows no progress within a sync.
        self._sync = PacedSync(BLOCK)
        self._direct = DirectWriter(files, BLOCK)
        self._steps: Iterator[None] | None = None
        self._held: _Held = {}
        self.parts: list[WrittenPart] = []
        self.not_finite: list[NotFinite] = []

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *ended: object) -> None:
        self._direct.__exit__(*ended)

    def add_content(self, file: int, at: int, content: torch.Tensor) -> None:
        """Add flat bytes in host memory at byte `at` of the file with this number."""
        view = _view(content)
        for begin, end in _cut(at, len(view)):  # a tensor without elements has no bytes
            part = view[begin:end]
            self._stretches.append(_Stretch(file, at + begin, len(part), functools.partial(_slice, part)))

    def add_shards(
        self, regions: Sequence[Region], optimizers: Sequence[Any], own_shards: Sequence[Mapping[int, Any]]
    ) -> None:
        """Add the elements of `regions` in the shards that this rank gives (`shards.own_shards`)."""
        # Once for each bucket, not for each region: a file of one archive per tensor has many regions.
        buckets: dict[tuple[int, int], list[shards.Bucket]] = {}
        pieces: dict[tuple[int, int, int, int], list[_Piece]] = {}
        filled: dict[tuple[int, int, int, int], list[_Piece]] = {}
        for region in regions:
            optimizer, buffer = optimizers[region.position], (region.position, region.number)
            if buffer not in buckets:
                buckets[buffer] = shards.buckets_of(optimizer, optimizer.buffers[region.number])
            for bucket in buckets[buffer]:
                for index, reader in own_shards[region.position].items():
                    start, stop = bucket.extent(index)
                    begin, end = max(start, region.begin), min(stop, region.end)
                    if begin < end:
                        if (place := (*buffer, bucket.index, index)) not in pieces:
                            part = reader(region.number, bucket.index)
                            pieces[place] = sorted(
                                (
                                    (start + low, start + high, shard_reader)
                                    for low, high, shard_reader in part
                                ),
                                key=_extent,
                            )
                        if region.view:
                            if place not in filled:
                                filled[place] = _without_gaps(pieces[place], start, stop)
                            self._add_strided(region, index, filled[place])
                            continue
                        self._add_shard(region, index, pieces[place], begin, end)

    def _add_shard(self, region: Region, index: int, pieces: Sequence[_Piece], begin: int, end: int) -> None:
        itemsize = getattr(torch, region.dtype).itemsize
        at = region.at + (begin - region.begin) * itemsize
        for low, high in _cut(at, (end - begin) * itemsize):
            first, last = begin + low // itemsize, begin + high // itemsize
            shard = _Shard(region, index, first, self._blocks, self._exchange, self.not_finite)
            shard.open(pieces, last)
            observer, see = self._exchange.observer, None
            if observer is not None:  # not by a method of this object: a cycle would keep the process group
                see = functools.partial(_show, observer, region, first, itemsize)
            self._stretches.append(_Stretch(region.file, at + low, high - low, shard.read, see))

    def _add_strided(self, region: Region, index: int, pieces: Sequence[_Piece]) -> None:
        view = StridedView(region.begin, region.view)
        for piece in _between(pieces, region.begin, region.end):
            part = _StridedPart(region, index, view, piece, self._exchange, self.not_finite, self._held)
            for first, last in view.runs(*_extent(piece)):
                at = region.at + first * part.itemsize
                for low, high in _cut(at, (last - first) * part.itemsize):
                    read = functools.partial(part.read, first + low // part.itemsize)
                    self._stretches.append(_Stretch(region.file, at + low, high - low, read))

    def write_for(self, seconds: float) -> bool:
        """Write for some `seconds`, and a block more at most, the added parts; return True if all is on disk.

        No write is under way on return. Raises CheckpointError (other bytes than those of the state were
        written), OSError, DumpCancelled.
        """
        until = time.monotonic() + seconds
        self._steps = self._steps or self._run()
        is_done = all(time.monotonic() < until for _ in self._steps)
        self._direct.settle()
        return is_done

    def _run(self) -> Iterator[None]:
        """Write all parts and sync the files; yield after each block."""
        for stretch in sorted(self._stretches, key=self._order):
            yield from self._write(stretch)
        self._stretches = []
        self._direct.settle()
        if self._exchange.observer is not None:
            self._exchange.observer.require_written()
        for descriptor in self._files:
            os.fsync(descriptor)
            yield

    def _order(self, stretch: _Stretch) -> tuple[bool, int, int]:
        return stretch.is_whole and self._direct.takes(stretch.file), stretch.file, stretch.at

    def _write(self, stretch: _Stretch) -> Iterator[None]:
        descriptor, digested, crc, digests = self._files[stretch.file], 0, 0, bytearray()
        while digested < stretch.size:
            at = stretch.at + digested
            count = min(BLOCK - at % BLOCK, stretch.size - digested)
            data = stretch.read(digested, digested + count)
            if stretch.see is not None:
                stretch.see(digested, data)
            crc = crc32(data, crc)
            is_whole = count == BLOCK
            if is_whole:
                digests += xxhash.xxh3_128_digest(data)
            if not (is_whole and self._direct.take(stretch.file, data, at)):
                write_all(descriptor, data, at)
                self._sync.wrote(descriptor, count)
            digested += count
            self._exchange.advanced(count)
            yield
        self.parts.append(WrittenPart(stretch.file, stretch.at, stretch.size, crc, bytes(digests)))


def _show(
    observer: Observer, region: Region, first: int, itemsize: int, begin: int, data: memoryview
) -> None:
    observer.see(region, first + begin // itemsize, data)


class _Blocks:
    """The memory of a block in the saved dtype, and of its elements (two bytes or more) from a device."""

    def __init__(self) -> None:
        self.saved = torch.empty(BLOCK, dtype=torch.uint8, device="cpu")
        self.from_device = torch.empty(BLOCK // 2, dtype=torch.float32, device="cpu")


class _Shard:
    """Reads the elements of a region in one shard's part of a bucket; zero between params."""

    def __init__(
        self,
        region: Region,
        index: int,
        begin: int,
        blocks: _Blocks,
        exchange: Exchange,
        not_finite: list[NotFinite],
    ) -> None:
        self._region, self._index, self._begin = region, index, begin
        self._blocks, self._exchange, self._not_finite = blocks, exchange, not_finite
        self._dtype = getattr(torch, region.dtype)
        self.itemsize = self._dtype.itemsize
        self._pieces: list[tuple[int, int, torch.Tensor]] = []

    def open(self, pieces: Sequence[_Piece], end: int) -> None:
        """Take the tensors of the shard's part of a bucket that lie in front of element `end`."""
        for start, stop, tensors in reversed(_between(pieces, self._begin, end)):
            tensor = shards.tensor_of(tensors, self._region.key)
            self._pieces.append((start, stop, tensor.detach().view(-1)))

    def read(self, begin: int, end: int) -> memoryview:
        first, last = (self._begin + edge // self.itemsize for edge in (begin, end))
        if (host_bytes := self._on_host(first, last)) is not None:
            self._note(host_bytes, first, last)
            return _view(host_bytes.view(torch.uint8))
        block_bytes = self._blocks.saved[: (last - first) * self.itemsize]
        block, filled = block_bytes.view(self._dtype), first
        while self._pieces and self._pieces[-1][0] < last:  # in order, and read in order
            start, stop, tensor = self._pieces[-1]
            low, high = max(start, first), min(stop, last)
            block[filled - first : low - first].zero_()
            into, part = block[low - first : high - first], tensor[low - start : high - start]
            if part.device.type == "cpu" or part.dtype == self._dtype:
                self._exchange.device.copy(into, part)
            else:
                on_host = self._blocks.from_device[: high - low]
                self._exchange.device.copy(on_host, part)
                into.copy_(on_host)
            self._note(into, low, high)
            filled = high
            if stop > last:
                break
            self._pieces.pop()
        block[filled - first :].zero_()
        return _view(block_bytes)

    def _on_host(self, first: int, last: int) -> torch.Tensor | None:
        """Return elements [`first`, `last`) in place if one tensor on the host has them in that dtype."""
        while self._pieces and self._pieces[-1][1] <= first:
            self._pieces.pop()
        if not self._pieces:
            return None
        start, stop, tensor = self._pieces[-1]
        is_whole = start <= first and last <= stop and tensor.dtype == self._dtype == torch.float32
        return tensor[first - start : last - start] if is_whole and tensor.device.type == "cpu" else None

    def _note(self, content: torch.Tensor, first: int, last: int) -> None:
        """Note elements [`first`, `last`) if they are not finite in the saved dtype."""
        if not shards.is_finite(content):
            self._not_finite.append(_not_finite(self._region, self._index, first, last))


class _StridedPart:
    """Reads the elements of a region with a view in one param of a shard."""

    def __init__(
        self,
        region: Region,
        index: int,
        view: StridedView,
        piece: _Piece,
        exchange: Exchange,
        not_finite: list[NotFinite],
        held_part: _Held,
    ) -> None:
        self._region, self._index, self._view, self._exchange = region, index, view, exchange
        self._begin, self._end, tensors = piece
        self._tensor = shards.tensor_of(tensors, region.key).detach().view(-1)
        self._not_finite = not_finite
        self._is_finite = True
        self._held = held_part
        self._dtype = getattr(torch, region.dtype)
        self.itemsize = self._dtype.itemsize

    def read(self, start: int, begin: int, end: int) -> memoryview:
        """Return bytes [`begin`, `end`) of the run that begins at element `start` of the view."""
        first, last = (start + edge // self.itemsize for edge in (begin, end))
        low, held_part = self._on_host(first, last)
        content = held_part[self._view.places(first, last) - low].to(self._dtype)
        if self._is_finite and not shards.is_finite(content):
            self._is_finite = False
            self._not_finite.append(_not_finite(self._region, self._index, self._begin, self._end))
        return _view(content.view(torch.uint8))

    def _on_host(self, first: int, last: int) -> tuple[int, torch.Tensor]:
        """Return the matrices with these elements on the host, and their begin in the world tensor."""
        low, high = self._view.extent(first, last)
        low, high = max(low, self._begin), min(high, self._end)
        if 2 * (high - low) > self._end - self._begin:  # interleaved matrices need the whole range each
            low, high = self._begin, self._end
        held_part = self._held.get(self._index)
        if held_part is None or held_part[:3] != (self, low, high):
            held_part = None
            self._held.pop(self._index, None)  # one part of a shard at a time
            device_part = self._tensor[low - self._begin : high - self._begin]
            held_part = self._held[self._index] = self, low, high, self._exchange.device.to_host(device_part)
        return low, held_part[3]


def _not_finite(region: Region, index: int, begin: int, end: int) -> NotFinite:
    return NotFinite(region.position, region.number, region.key, region.dtype, index, begin, end)


def _slice(view: memoryview, begin: int, end: int) -> memoryview:
    return view[begin:end]


def _view(content: torch.Tensor) -> memoryview:
    array: Any = content.numpy()
    return memoryview(array)


def write_all(descriptor: int, data: bytes | memoryview, at: int) -> None:
    """Write all of `data` at byte `at` of a file. Raises OSError."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, at)
        view, at = view[count:], at + count


def read_all(descriptor: int, count: int, at: int) -> bytes:
    """Read `count` bytes at byte `at` of a file, fewer if the file ends. Raises OSError."""
    data = os.pread(descriptor, count, at)
    while len(data) < count and (chunk := os.pread(descriptor, count - len(data), at + len(data))):
        data += chunk
    return data
