"""Reads a file of a checkpoint in pieces, and compares it with what the manifest says."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import xxhash

from adaptor.checkpoint import disk, hashing, manifest
from adaptor.errors import CheckpointError
from adaptor.protocol.file_entry import FileEntry


def compared(path: Path, file: FileEntry, digest: xxhash.xxh3_128, piece: int) -> Iterator[bytearray]:
    """Yield a file in pieces of `piece` bytes, the last one of fewer, and add them to `digest`.

    Args:
        path: where the file is.
        file: what the manifest says of it.
        digest: of the whole file, when all pieces have been yielded.
        piece: bytes of each.

    Raises:
        CheckpointError: behind the last piece, where they are not what the manifest says.
    """
    blocks = hashing.BlockDigest()
    for content in _read(path, file, piece):
        digest.update(content)
        if file.xxh3_128_blocks is not None:
            blocks.update(content)
        yield content
    is_equal = file.xxh3_128 in (None, digest.hexdigest())
    if not is_equal or file.xxh3_128_blocks not in (None, blocks.hexdigest()):
        raise CheckpointError(f"{path}: checksum differs from the manifest, so it is not sent")


def _read(path: Path, file: FileEntry, piece: int) -> Iterator[bytearray]:
    """Yield the pieces of a file, which has the size that the manifest says."""
    remaining = file.bytes
    try:
        with io.FileIO(disk.open_regular(path)) as opened:
            while content := _filled(opened, min(piece, remaining)):
                remaining -= len(content)
                yield content
            is_longer = bool(opened.read(1))
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else manifest.UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror or error})") from None
    if remaining or is_longer:
        raise CheckpointError(f"{path}: has another size than the {file.bytes} bytes of the manifest")


def _filled(opened: io.FileIO, count: int) -> bytearray:
    """Return `count` bytes, fewer at the end of the file."""
    piece = bytearray(count)
    view, filled = memoryview(piece), 0
    while filled < count and (count_read := opened.readinto(view[filled:])):
        filled += count_read
    view.release()
    del piece[filled:]
    return piece
