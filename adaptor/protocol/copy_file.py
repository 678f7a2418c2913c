"""The file in memory with one host copy of a rank: written by the worker, held open by its agent.

The file is anonymous (a memfd), so it outlives the worker, and vanishes when the last agent that holds it has
ended, in any way. Invariant: the header is valid only while the content is whole. A writer removes the header
first, and writes it last; after a death in between the file has no copy.

`CopyHello`, `CopyFollows` and `CopyKept` are the messages between the agents of two nodes, of which one keeps
the host copies of the other's ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from adaptor.protocol import wire
from adaptor.protocol.messages import Count, Message, Number

HEADER_BYTES = 4096  # a page: the content behind can be mapped separately
_FIELDS = struct.Struct("<8s32sqqqqQ")
_DIGEST = struct.Struct("<Q")
_MAGIC = b"ttp-copy"
# Written by the agent into the page of the header: the step that another node has, too, plus one.
_KEPT, _KEPT_AT = struct.Struct("<q"), 1024
# The files of a rank: while one is written, the other is whole.
FILES = 2
# Bytes of the content that are hashed, sent or read at once.
PIECE = 8 << 20


class CopyHeader(NamedTuple):
    """The description of a whole copy.

    Attributes:
        generation: the start of the workers in which the copy was made
        digest: xxh3_64 of the content
    """

    generation: str
    world_size: int
    rank: int
    step: int
    size: int
    digest: int

    @property
    def key(self) -> tuple[str, int]:
        """Return the start of the workers and the step; copies with the same key belong together."""
        return self.generation, self.step


class CopyFile:
    """One file of a host copy.

    Args:
        file: `/proc/PID/fd/N` of the agent, which is opened; or a descriptor, which is not to be closed here.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, file: str | int) -> None:
        self._fd = file if isinstance(file, int) else os.open(file, os.O_RDWR | os.O_CLOEXEC)
        self._memory: mmap.mmap | None = None

    @property
    def header(self) -> CopyHeader | None:
        """Return the header; None without a whole copy."""
        raw_fields = os.pread(self._fd, _FIELDS.size + _DIGEST.size, 0)
        if len(raw_fields) < _FIELDS.size + _DIGEST.size:
            return None
        fields, (digest,) = raw_fields[: _FIELDS.size], _DIGEST.unpack(raw_fields[_FIELDS.size :])
        if not fields.startswith(_MAGIC) or xxhash.xxh3_64_intdigest(fields) != digest:
            return None
        _, generation, *numbers = _FIELDS.unpack(fields)
        name = generation.rstrip(b"\0").decode("ascii", "replace")
        return CopyHeader(name, *numbers)

    @property
    def content(self) -> memoryview:
        """Return the memory of the content, with the room behind."""
        if self._memory is None or len(self._memory) != os.fstat(self._fd).st_size:
            self._memory = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        return memoryview(self._memory)[HEADER_BYTES:]

    def read(self, start: int, count: int) -> bytes:
        """Return bytes of the content. Raises EOFError if shortened; a mapping would kill the reader."""
        data = os.pread(self._fd, count, HEADER_BYTES + start)
        if len(data) < count:
            raise EOFError("the copy was given up")
        return data

    @property
    def kept(self) -> int:
        """Return the step of the copy that another node has, too; -1: none is known."""
        raw_fields = os.pread(self._fd, _KEPT.size, _KEPT_AT)
        return int(_KEPT.unpack(raw_fields)[0]) - 1 if len(raw_fields) == _KEPT.size else -1

    def note_kept(self, step: int) -> None:
        """Note that another node has the copy of `step`, too; only the agent calls this."""
        if os.fstat(self._fd).st_size >= HEADER_BYTES:
            os.pwrite(self._fd, _KEPT.pack(step + 1), _KEPT_AT)

    def forget_kept(self) -> None:
        """Note that no other node has this copy any more; only the agent calls this."""
        self.note_kept(-1)

    def reserve(self, size: int) -> None:
        """Reserve room for `size` bytes, so that writing needs no further memory. Raises OSError."""
        file_bytes = HEADER_BYTES + size
        if os.fstat(self._fd).st_size < file_bytes:
            self._memory = None
            os.ftruncate(self._fd, file_bytes)
        os.posix_fallocate(self._fd, 0, file_bytes)

    def begin(self) -> None:
        """Remove the header: the content is about to change."""
        if os.fstat(self._fd).st_size:
            os.pwrite(self._fd, bytes(_FIELDS.size), 0)

    def clear(self) -> None:
        """Give the copy up, and its memory back."""
        self._memory = None
        os.ftruncate(self._fd, 0)

    def commit(self, header: CopyHeader) -> None:
        """Write the header: the content is whole."""
        generation, *numbers = header
        fields = _FIELDS.pack(_MAGIC, generation.encode("ascii"), *numbers)
        os.pwrite(self._fd, fields + _DIGEST.pack(xxhash.xxh3_64_intdigest(fields)), 0)

    def digest(self, size: int) -> int:
        """Return the checksum of the first `size` bytes of the content."""
        return digest_of(self.content[:size])

    def close(self) -> None:
        self._memory = None
        os.close(self._fd)


def digest_of(content: memoryview) -> int:
    """Return the checksum of a content."""
    content_hash = xxhash.xxh3_64()
    for start in range(0, len(content), PIECE):
        content_hash.update(content[start : start + PIECE])
    return int(content_hash.intdigest())


# More than any host has.
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 50)]


class CopyHello(Message, frozen=True):
    """Sender to keeper: the first message of a connection."""

    node: Number


class CopyFollows(Message, frozen=True):
    """Sender to keeper: `size` bytes follow, the content of a copy.

    Attributes:
        beside: the step of the other copy that the sender has of the rank, which stays; -1: none
        generation: the start of the workers in which the copy was made
        digest: xxh3_64 of the content
    """

    beside: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
    generation: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{1,32}$")]
    world_size: Count
    rank: Number
    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    size: _Bytes
    digest: Annotated[int, msgspec.Meta(ge=0)]


class CopyKept(Message, frozen=True):
    """Keeper to sender: the copy is whole and kept; or the `reason` why not."""

    rank: Number
    step: int
    reason: str = ""


to_keeper: wire.Decoder[CopyHello | CopyFollows] = wire.Decoder(
    msgspec.msgpack.Decoder(CopyHello | CopyFollows)
)
from_keeper: wire.Decoder[CopyKept] = wire.Decoder(msgspec.msgpack.Decoder(CopyKept))
