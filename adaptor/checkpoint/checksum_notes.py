"""Checksums of a regular save: each rank leaves those of the files that it has written beside them.

Rank 0, which makes the manifest, takes them from there: it need not read what others have written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from adaptor.checkpoint import disk, manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry

_SUFFIX = ".ttp-xxh3"
_LARGEST = 1 << 12  # of a note, in bytes


class _Note(msgspec.Struct):
    bytes: int
    xxh3_128: str


def leave(folder: Path, entry: FileEntry) -> None:
    """Leave the checksum of a file of the save in `folder`. Raises OSError."""
    text = msgspec.json.encode(_Note(entry.bytes, entry.xxh3_128 or ""))
    with os.fdopen(disk.create(folder, f"{entry.path}{_SUFFIX}"), "wb") as file:
        file.write(text)


def is_note(path: Path) -> bool:
    """Return whether a file of a save is a note, and no part of the checkpoint."""
    return path.name.endswith(_SUFFIX)


def entries(folder: Path, files: list[Path]) -> list[FileEntry]:
    """Return the entries of the manifest for these files; without a checksum where nobody has left one.

    Raises:
        OSError: a file is not there.
    """
    earlier = _of_earlier_call(folder)
    found = []
    for path in files:
        name, size = path.relative_to(folder).as_posix(), path.stat().st_size
        note = _read(path) or earlier.get(name)
        found.append(
            FileEntry(name, size, note.xxh3_128 if note is not None and note.bytes == size else None)
        )
    return found


def remove(folder: Path) -> None:
    """Remove all notes; call it when the manifest has them. Raises OSError."""
    for path in list(disk.files(folder)):
        if is_note(path):
            path.unlink()


def _read(path: Path) -> _Note | None:
    try:
        text = disk.read(path.with_name(f"{path.name}{_SUFFIX}"), _LARGEST)
        return msgspec.json.decode(text, type=_Note)
    except (OSError, msgspec.MsgspecError):
        return None


def _of_earlier_call(folder: Path) -> Mapping[str, _Note]:
    """Return what the manifest has of a call that made it, and did not come to give the folder its name."""
    if not (folder / naming.MANIFEST).exists():
        return {}
    try:
        files = manifest.read(folder).files
    except CheckpointError:
        return {}
    return {entry.path: _Note(entry.bytes, entry.xxh3_128) for entry in files if entry.xxh3_128 is not None}
