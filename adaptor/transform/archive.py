"""Reads archives of torch without the classes of a framework, and without reading tensors.

An archive is a zip file, uncompressed, with a pickle of the structure and a file for each storage.
`pickles.py` reads the pickle to records (`records.py`) and imports nothing; `writing.py` writes the records
again as the same objects.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

from adaptor.errors import CheckpointError
from adaptor.transform import pickles
from adaptor.transform.records import Archive, StoredTensor

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive
_LARGEST_PICKLE = 64 << 20


def read(path: Path) -> Any:
    """Return the content of an archive, with records (`records.py`) in the place of tensors and objects.

    Raises:
        CheckpointError: the file is no archive of torch, is damaged, or has an object that is not read.
    """
    return _read(path, 0, None)


def read_inside(archive: Archive) -> Any:
    """Return the content of an archive inside of a file, like `read`."""
    return _read(archive.path, archive.begin, archive.length)


def only_tensor(archive: Archive) -> StoredTensor:
    """Return the tensor of an archive inside of a file whose whole content is one tensor.

    Raises:
        CheckpointError: the content is something else; or as `read`.
    """
    value = read_inside(archive)
    if not isinstance(value, StoredTensor):
        raise CheckpointError(
            f"{archive.path}: has a {type(value).__name__} at byte {archive.begin}, no tensor"
        )
    return value


def _read(path: Path, begin: int, length: int | None) -> Any:
    try:
        with path.open("rb") as whole_file:
            if length is not None and begin + length > os.fstat(whole_file.fileno()).st_size:
                raise CheckpointError(f"{path}: ends before byte {begin + length}")
            file: Any = whole_file if length is None else _FilePart(whole_file, begin, length)
            with zipfile.ZipFile(file) as archive:
                name, storages = _members(archive, file, path, begin)
                return pickles.load(archive.read(name), path, storages)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: there is not enough memory to read its structure") from error
    except Exception as error:  # a damaged archive raises any exception
        raise CheckpointError(f"{path}: is no archive of torch, or is damaged ({error})") from error


class _FilePart(io.RawIOBase):
    """A part of a file, read like a file."""

    def __init__(self, file: IO[bytes], begin: int, length: int) -> None:
        self._descriptor = file.fileno()
        self._begin = begin
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a place, as files do."""
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._length))
        return self._at

    def tell(self) -> int:
        """Return the place, in bytes from the start of the part."""
        return self._at

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` bytes; with a negative `count` all bytes to the end of the part."""
        remaining = max(0, self._length - self._at)
        data = os.pread(
            self._descriptor, remaining if count < 0 else min(count, remaining), self._begin + self._at
        )
        self._at += len(data)
        return data


def _members(
    archive: zipfile.ZipFile, file: IO[bytes], path: Path, begin: int
) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the name of the pickle, and offset and size of each storage in the file.

    Args:
        archive: the open archive.
        file: the file of the archive.
        path: of the file on disk, in which the archive begins at byte `begin`.
    """
    (name,) = (
        member_name
        for member_name in archive.namelist()
        if member_name.count("/") == 1 and member_name.endswith("/data.pkl")
    )
    root = name.removesuffix("data.pkl")
    length = file.seek(0, os.SEEK_END)
    storages = {}
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{path}: is compressed, which is not read")
        if info.filename.startswith(f"{root}data/"):
            file.seek(info.header_offset)
            header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
            start = info.header_offset + _LOCAL_HEADER.size + header[-2] + header[-1]
            if start + info.file_size > length:
                raise CheckpointError(f"{path}: ends before the end of {info.filename}")
            storages[info.filename.removeprefix(f"{root}data/")] = (begin + start, info.file_size)
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise CheckpointError(f"{path}: was written on a big-endian machine, which is not read")
    if archive.getinfo(name).file_size > _LARGEST_PICKLE:
        raise CheckpointError(f"{path}: its structure has more than {_LARGEST_PICKLE >> 20} MiB; not read")
    return name, storages
