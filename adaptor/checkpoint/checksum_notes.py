"""Checksums of a regular save: each rank leaves those of the files that it has written beside them.

Rank 0, which makes the manifest, takes them from there: it need not read what others have written. A note is
optional: where one cannot be written, read or removed, the save goes on, and its file has no checksum.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from adaptor.checkpoint import disk, hashing, manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry

_SUFFIX = ".ttp-xxh3"
_LARGEST = 1 << 12  # of a note, in bytes
_SMALL = 64 << 20  # of a file that rank 0 hashes for others, in bytes: a hundredth of a second


class _Note(msgspec.Struct):
    bytes: int
    xxh3_128: str
    xxh3_128_blocks: str | None = None


def leave(folder: Path, entry: FileEntry) -> None:
    """Leave the checksum of a file of the save in `folder`, which has been written; call it after that.

    Where the disk refuses (it is full, the name with the suffix is too long), there is no note.
    """
    text = msgspec.json.encode(_Note(entry.bytes, entry.xxh3_128 or "", entry.xxh3_128_blocks))
    try:
        with os.fdopen(disk.create(folder, f"{entry.path}{_SUFFIX}"), "wb") as file:
            file.write(text)
    except OSError:
        with contextlib.suppress(
            OSError
        ):  # a part of it; `entries` reads no note that is older than its file
            (folder / f"{entry.path}{_SUFFIX}").unlink()


def hash_and_leave(folder: Path, path: Path) -> None:
    """Hash a file of the save in `folder`, which has been written, and leave its checksum.

    Where it cannot be read, there is no note.
    """
    with contextlib.suppress(OSError):
        leave(folder, hashing.entry_of(path, path.relative_to(folder).as_posix()))


def complete(folder: Path, files: list[Path]) -> None:
    """Hash the files of a save in `folder` that nobody has hashed on their way, unless they are large.

    Large are only those that a process writes into which the adaptor cannot look.

    Raises:
        OSError: a file is not there.
    """
    for path in files:
        state = path.stat()
        note = _read(path, state)
        if state.st_size <= _SMALL and (note is None or note.bytes != state.st_size):
            hash_and_leave(folder, path)


def is_note(path: Path) -> bool:
    """Return whether a file of a save is a note, and no part of the checkpoint."""
    return path.name.endswith(_SUFFIX)


def without_file(folder: Path) -> bool:
    """Return whether there is a note of a file that is not there."""
    return any(is_note(path) and not _noted(path).exists() for path in disk.files(folder))


def require_readable(folder: Path) -> None:
    """Read each note, which `entries` takes for none where it cannot be read.

    Raises:
        OSError: one cannot be read, though the note may be intact.
    """
    for path in disk.files(folder):
        if is_note(path):
            try:
                disk.read(path, _LARGEST)
            except OSError as error:
                if not disk.is_wrong(error):
                    error.filename = error.filename or str(path)
                    raise


def _noted(note: Path) -> Path:
    return note.with_name(note.name.removesuffix(_SUFFIX))


def entries(folder: Path, files: list[Path]) -> list[FileEntry]:
    """Return the entries of the manifest for these files; without a checksum where nobody has left one.

    Raises:
        OSError: a file is not there.
    """
    earlier = _of_earlier_call(folder)
    file_entries = []
    for path in files:
        name, state = path.relative_to(folder).as_posix(), path.stat()
        note = _read(path, state) or (
            earlier.get(name) if _is_newer(folder / naming.MANIFEST, state) else None
        )
        if note is None or note.bytes != state.st_size:
            file_entries.append(FileEntry(name, state.st_size, None))
        else:
            blocks = note.xxh3_128_blocks
            file_entries.append(FileEntry(name, note.bytes, note.xxh3_128, xxh3_128_blocks=blocks))
    return file_entries


def remove(folder: Path) -> None:
    """Remove all notes; call it when the manifest has them. One that cannot be removed stays."""
    with contextlib.suppress(OSError):
        for path in list(disk.files(folder)):
            if is_note(path):
                with contextlib.suppress(OSError):
                    path.unlink()


def _is_newer(written: Path, state: os.stat_result) -> bool:
    """Return whether a file with checksums was written after the file with this state."""
    try:
        return written.stat().st_mtime_ns >= state.st_mtime_ns
    except OSError:
        return False


def _read(path: Path, state: os.stat_result) -> _Note | None:
    """Return the note of the file with this state; none of an earlier file of its name."""
    note = path.with_name(f"{path.name}{_SUFFIX}")
    if not _is_newer(note, state):
        return None
    try:
        text = disk.read(note, _LARGEST)
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
    return {
        entry.path: _Note(entry.bytes, entry.xxh3_128, entry.xxh3_128_blocks)
        for entry in files
        if entry.xxh3_128 is not None
    }
