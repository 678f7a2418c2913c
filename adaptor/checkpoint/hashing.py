"""Checksums of the files of a checkpoint, of existing files and of files that are being written, and their
syncs.
"""

from __future__ import annotations

import functools
import importlib
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import xxhash

from adaptor.checkpoint import disk
from adaptor.protocol.naming import FileEntry

# Small enough that a slice is still in the cache when it is written after the hash, and that progress is
# reported several times a second on a slow disk.
_SLICE = 4 << 20
# A larger file has a checksum of its blocks besides: the ranks of a job divide the blocks among them. In
# bytes.
_UNDIVIDED = 4 << 20


def hash_file(path: Path) -> str:
    """Return the xxh3-128 of a file's content, in hexadecimal."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def _pieces(path: Path) -> Iterator[memoryview]:
    """Yield the content of a file; each piece is valid until the next."""
    memory = memoryview(bytearray(BLOCK))  # stays in the cache
    with os.fdopen(disk.open_regular(path), "rb", buffering=0) as file:
        while count := file.readinto(memory):
            yield memory[:count]


DIGEST_BYTES = 16
BLOCK = 1 << 20  # bytes of each part of a file with a digest of its own; part of the format of manifests


class BlockDigest:
    """The xxh3-128 of the xxh3-128 of each block of a file; several processes may hash the blocks."""

    def __init__(self) -> None:
        self._whole = xxhash.xxh3_128()
        self._block = xxhash.xxh3_128()
        self._in_block = 0

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the file."""
        view = memoryview(data)
        while view:
            piece = view[: BLOCK - self._in_block]
            self._block.update(piece)
            self._in_block += len(piece)
            view = view[len(piece) :]
            if self._in_block == BLOCK:
                self._end_block()

    def add_block(self, digest: bytes) -> None:
        """Add a whole block of the file, or its last block, by the xxh3-128."""
        self._whole.update(digest)

    def _end_block(self) -> None:
        self.add_block(self._block.digest())
        self._block.reset()
        self._in_block = 0

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal; nothing is added afterwards."""
        if self._in_block:
            self._end_block()
        return str(self._whole.hexdigest())


class Digests:
    """All checksums of a file that is hashed front to back (`bytes` so far)."""

    def __init__(self) -> None:
        self.bytes = 0
        self._whole = xxhash.xxh3_128()
        self._blocks = BlockDigest()

    def update(self, data: bytes | bytearray | memoryview) -> None:
        """Add the next bytes of the file."""
        self.bytes += len(data)
        self._whole.update(data)
        self._blocks.update(data)

    def entry(self, path: str, attempt: int | None = None) -> FileEntry:
        """Return the entry of the file under `path`; nothing is added afterwards."""
        blocks = self._blocks.hexdigest() if self.bytes > _UNDIVIDED else None
        return FileEntry(path, self.bytes, self._whole.hexdigest(), attempt, blocks)


def entry_of(path: Path, name: str) -> FileEntry:
    """Return the entry, under `name`, of an existing file. Raises OSError."""
    digests = Digests()
    for piece in _pieces(path):
        digests.update(piece)
    return digests.entry(name)


def has_content_of(path: Path, entry: FileEntry) -> bool:
    """Return True if the file at `path` has the checksum of `entry`. Raises OSError."""
    if entry.xxh3_128 is not None:
        return hash_file(path) == entry.xxh3_128
    return join_blocks(block_digests(path, 0, blocks_of(entry))) == entry.xxh3_128_blocks


def blocks_of(entry: FileEntry) -> int:
    """Return the number of blocks of a file; the last block may be shorter than the others."""
    return -(-entry.bytes // BLOCK)


def block_digests(path: Path, first: int, end: int, threads: int = 1) -> bytes:
    """Return the joined xxh3-128 of the blocks [`first`, `end`) of a file, by `threads`. Raises OSError."""
    descriptor = disk.open_regular(path)
    try:
        # The threads take stretches in turn: the disk sees one reader with several requests.
        stretches = range(first, end, _SLICE // BLOCK)
        threads = max(1, min(threads, len(stretches)))
        hashed = functools.partial(_digests_in, descriptor, end)
        if threads == 1:
            return b"".join(hashed(stretches))
        with ThreadPoolExecutor(threads, thread_name_prefix="ttp-hash") as pool:
            digests_by_thread = list(
                pool.map(hashed, (stretches[number::threads] for number in range(threads)))
            )
        return b"".join(
            digests_by_thread[number % threads][number // threads] for number in range(len(stretches))
        )
    finally:
        os.close(descriptor)


def _digests_in(descriptor: int, end: int, stretches: range) -> list[bytes]:
    """Return the digests of the blocks of each stretch, as far as they stand before block `end`."""
    memory, block_list = memoryview(bytearray(BLOCK)), []  # memory that stays in the cache
    for first in stretches:
        digests = bytearray()
        for block in range(first, min(first + _SLICE // BLOCK, end)):
            filled = 0
            while filled < BLOCK and (
                count := os.preadv(descriptor, [memory[filled:]], block * BLOCK + filled)
            ):
                filled += count
            if filled:
                digest = xxhash.xxh3_128()
                digest.update(memory[:filled])  # without the interpreter's lock
                digests += digest.digest()
        block_list.append(bytes(digests))
    return block_list


def join_blocks(digests: bytes) -> str:
    """Return the digest of a file, in hexadecimal, from the digests of all its blocks."""
    return str(xxhash.xxh3_128_hexdigest(digests))


class HashingFile:
    """A write-only binary file that hashes and counts its bytes: `torch.save(obj, HashingFile(path))`.

    torch writes its archives front to back and never seeks, so one pass is enough. `progress` is called with
    the number of bytes of each written slice; an exception from `progress` ends the write. The file is made
    anew; no link is followed below `base_folder`, by default the folder of the file.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[int], None] = lambda count: None,
        base_folder: Path | None = None,
    ) -> None:
        self.path = path
        root = base_folder or path.parent
        self.bytes = 0
        self._progress = progress
        self._failure: BaseException | None = None
        self._digests = Digests()
        self._also: list[Callable[[memoryview], None]] = []
        descriptor = disk.create(root, path.relative_to(root).as_posix())
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._sync = PacedSync(_SLICE)

    def also(self, update: Callable[[memoryview], None]) -> None:
        """Pass all bytes that are written from now on to a second digest, too."""
        self._also.append(update)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of `data`; return its size in bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _SLICE):
                piece = view[start : start + _SLICE]
                self._digests.update(piece)
                for update in self._also:
                    update(piece)
                self._write_all(piece)
                self._progress(len(piece))
        except BaseException as error:
            self._failure = self._failure or error
            raise
        return len(view)

    def _write_all(self, piece: memoryview) -> None:
        while piece:
            count = self._file.write(piece)
            self.bytes += count
            self._sync.wrote(self._file.fileno(), count)
            piece = piece[count:]

    def flush(self) -> None:
        """Do nothing, because nothing is buffered; torch.save calls it."""

    def close(self) -> None:
        """Wait until every byte is on disk. Raises OSError."""
        if not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())

    def entry(self, path: str, attempt: int | None = None) -> FileEntry:
        """Return the entry of the written file, under `path` relative to the checkpoint folder."""
        return self._digests.entry(path, attempt)

    def __enter__(self) -> HashingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        self._file.close()
        if self._failure is not None and self._failure is not error:
            # torch.save tries to finish the archive all the same, and reports only the failure of that.
            raise self._failure


_Crc32 = Callable[[bytes | bytearray | memoryview, int], int]


def _fastest_crc32() -> _Crc32:
    try:
        # The same numbers, by instructions of the processor.
        function: _Crc32 = importlib.import_module("isal.isal_zlib").crc32
    except ImportError:
        return zlib.crc32
    return function


# Takes data and the CRC-32 of the bytes before, 0 for none; returns the CRC-32 of both together. Ten times as
# fast where the package isal is installed.
crc32 = _fastest_crc32()


# The longest stretch between two syncs, in bytes.
_LONGEST = 512 << 20
# The next stretch is the amount that the disk takes in this time, at the speed of the last stretch; at most
# this multiple.
_QUICK_S = 1.0
_GROWTH = 64
# Between two syncs the disk is told to begin after so many bytes: the disk works while the next bytes are
# made.
_BEGIN = 4 << 20


class PacedSync:
    """Syncs files while they are written, because one long sync at the end would look like a halt.

    The length of the stretches between syncs follows the speed of the disk; `shortest` is in bytes.
    """

    def __init__(self, shortest: int) -> None:
        self._shortest = self._stretch = shortest
        self._waiting = 0  # bytes since the last sync
        self._idle = 0  # bytes since the disk was last told to begin

    def wrote(self, descriptor: int, count: int) -> None:
        """Note that `count` bytes were written to a file; sync it at the end of a stretch. Raises OSError."""
        self._waiting += count
        self._idle += count
        if self._waiting >= self._stretch:
            began = time.monotonic()
            os.fdatasync(descriptor)
            growth = _QUICK_S / max(time.monotonic() - began, _QUICK_S / _GROWTH)
            self._stretch = min(max(int(growth * self._stretch), self._shortest), _LONGEST)
            self._waiting = self._idle = 0
        elif self._idle >= _BEGIN:
            disk.begin_to_write(descriptor)
            self._idle = 0
