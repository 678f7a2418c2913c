"""Reads archives of torch without the classes of a framework, and without reading tensors.

An archive is a zip file, uncompressed, with a pickle of the structure and a file for each storage. The
pickle is read by `pickles.py`, which makes records (`records.py`) and imports nothing; what they describe is
written again by `writing.py` as what it was.
"""

from __future__ import annotations

import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

from adaptor.errors import CheckpointError
from adaptor.transform import pickles

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive
_LARGEST_PICKLE = 64 << 20


def read(path: Path) -> Any:
    """Return the content of an archive, with records (`records.py`) in the place of tensors and objects.

    Raises:
        CheckpointError: it is no archive of torch, is damaged, or has an object that is not read.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            name, storages = _members(archive, file, path)
            return pickles.load(archive.read(name), path, storages)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: there is not enough memory to read its structure") from error
    except Exception as error:  # a damaged archive raises whatever it likes
        raise CheckpointError(f"{path}: is no archive of torch, or is damaged ({error})") from error


def _members(archive: zipfile.ZipFile, file: IO[bytes], path: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the name of the pickle, and offset and size of each storage in the file."""
    (name,) = (each for each in archive.namelist() if each.count("/") == 1 and each.endswith("/data.pkl"))
    root = name.removesuffix("data.pkl")
    length = os.fstat(file.fileno()).st_size
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
            storages[info.filename.removeprefix(f"{root}data/")] = (start, info.file_size)
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise CheckpointError(f"{path}: was written on a big-endian machine, which is not read")
    if archive.getinfo(name).file_size > _LARGEST_PICKLE:
        raise CheckpointError(f"{path}: its structure has more than {_LARGEST_PICKLE >> 20} MiB; not read")
    return name, storages
