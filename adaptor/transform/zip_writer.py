"""Writes a zip file front to back, its files stored as they are: what torch takes for an archive.

The standard library would do, but for the time that its CRC-32 takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from adaptor.checkpoint.crc32 import crc32

_ALIGNMENT = 64  # of the data of a file, as torch has it, in bytes
# A file with more bytes, and one that begins behind so many, has its numbers in fields of ZIP64.
_LIMIT = (1 << 31) - 1
_ELSEWHERE, _ELSEWHERE_16 = 0xFFFFFFFF, 0xFFFF
_LOCAL, _CENTRAL, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
_END_64, _LOCATOR_64 = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_DESCRIPTOR, _DESCRIPTOR_64 = struct.Struct("<4sIII"), struct.Struct("<4sIQQ")
_SIZES_64 = struct.Struct("<2H2Q")
_BEHIND = 0x08  # the flag of a file whose checksum and sizes stand behind its data
_VERSION, _VERSION_64 = 20, 45
_DATE = 0x21  # 1980-01-01, the first day that a zip file knows


class ZipWriter:
    """A zip file.

    Args:
        write: writes the next bytes of it.
        tell: returns the number of bytes that are written.
    """

    def __init__(
        self, write: Callable[[bytes | bytearray | memoryview], object], tell: Callable[[], int]
    ) -> None:
        self._write = write
        self._tell = tell
        self._begin = tell()
        self._directory: list[bytes] = []

    def add(self, name: str, size: int, pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        """Add a file whose data begins at a multiple of 64 bytes.

        Args:
            name: of printable ASCII.
            size: of its data, in bytes.
            pieces: of the data.

        Raises:
            ValueError: the pieces have another size.
        """
        text, begin = name.encode("ascii"), self._tell() - self._begin
        is_large = size > _LIMIT
        version = _VERSION_64 if is_large else _VERSION
        sizes = _SIZES_64.pack(1, 16, 0, 0) if is_large else b""
        padding = -(begin + _LOCAL.size + len(text) + len(sizes) + 4) % _ALIGNMENT
        extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding + sizes
        size_field = _ELSEWHERE if is_large else 0
        head = (b"PK\3\4", version, _BEHIND, 0, 0, _DATE, 0, size_field, size_field, len(text), len(extra))
        self._write(_LOCAL.pack(*head) + text + extra)
        crc = written = 0
        for piece in pieces:
            crc = crc32(piece, crc)
            written += len(piece)
            self._write(piece)
        if written != size:
            raise ValueError(f"{name}: has {written} bytes, {size} were expected")
        descriptor = _DESCRIPTOR_64 if is_large else _DESCRIPTOR
        self._write(descriptor.pack(b"PK\7\x08", crc, size, size))
        self._directory.append(_entry(text, size, crc, begin))

    def close(self) -> None:
        """Write the directory; nothing is added after it."""
        begin = self._tell() - self._begin
        directory, count = b"".join(self._directory), len(self._directory)
        size, end = len(directory), b""
        if count > _ELSEWHERE_16 - 1 or begin > _LIMIT or size > _LIMIT:
            end = _END_64.pack(b"PK\6\6", 44, _VERSION_64, _VERSION_64, 0, 0, count, count, size, begin)
            end += _LOCATOR_64.pack(b"PK\6\7", 0, begin + size, 1)
        number = min(count, _ELSEWHERE_16)
        end += _END.pack(b"PK\5\6", 0, 0, number, number, min(size, _ELSEWHERE), min(begin, _ELSEWHERE), 0)
        self._write(directory + end)


def _entry(name: bytes, size: int, crc: int, begin: int) -> bytes:
    """Return the entry of a file in the directory."""
    large = [size, size] if size > _LIMIT else []
    if begin > _LIMIT:
        large.append(begin)
    extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _VERSION_64 if large else _VERSION
    size_field = _ELSEWHERE if size > _LIMIT else size
    place = _ELSEWHERE if begin > _LIMIT else begin
    head = (
        b"PK\1\2",
        version,
        version,
        _BEHIND,
        0,
        0,
        _DATE,
        crc,
        size_field,
        size_field,
        len(name),
        len(extra),
    )
    return _CENTRAL.pack(*head, 0, 0, 0, 0, place) + name + extra
