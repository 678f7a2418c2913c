"""Checksums of a regular save: each rank leaves a note with the checksum beside each file that it has
written.

Rank 0, which makes the manifest, takes the checksums from the notes, without reading the files of other
ranks. A note is optional: if a note cannot be written, read or removed, the save goes on, and its file has no
checksum.
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
_LARGEST = 64 << 20  # of a note, in bytes; with the sums of tensors 100 bytes for each
_SMALL = 64 << 20  # of a file that rank 0 hashes for others, in bytes: a hundredth of a second


class _ChecksumNote(msgspec.Struct):
    bytes: int
    xxh3_128: str
    xxh3_128_blocks: str | None = None
    tensors: Mapping[str, str] = {}


def leave(folder: Path, entry: FileEntry, tensors: Mapping[str, str] | None = None) -> None:
    """Leave the checksum of a file of the save in `folder`; called after the file was written.

    If the disk refuses (full disk, name too long), no note is left.

    Args:
        folder: of the save.
        entry: of the file.
        tensors: the sums of the tensors in the file, by name (`verification`).
    """
    note = _ChecksumNote(entry.bytes, entry.xxh3_128 or "", entry.xxh3_128_blocks, tensors or {})
    text = msgspec.json.encode(note)
    try:
        with os.fdopen(disk.create(folder, f"{entry.path}{_SUFFIX}"), "wb") as file:
            file.write(text)
    except OSError:
        with contextlib.suppress(OSError):  # a part of the note; `entries` reads no note older than its file
            (folder / f"{entry.path}{_SUFFIX}").unlink()


def hash_and_leave(folder: Path, path: Path, tensors: Mapping[str, str] | None = None) -> None:
    """Hash a file of the save in `folder`, which has been written, and leave its checksum.

    If the file cannot be read, no note is left. `tensors`: see `leave`.
    """
    with contextlib.suppress(OSError):
        leave(folder, hashing.entry_of(path, path.relative_to(folder).as_posix()), tensors)


def tensors_of(path: Path) -> Mapping[str, str]:
    """Return the sums of the tensors in a file that was written; empty without a note of them."""
    try:
        note = _read(path, path.stat())
    except OSError:
        return {}
    return {} if note is None else note.tensors


def complete(folder: Path, files: list[Path]) -> None:
    """Hash the files of a save in `folder` without a note, unless they are large.

    Only files of a process that the adaptor cannot look into are large and without a note.

    Raises:
        OSError: a file is missing.
    """
    for path in files:
        state = path.stat()
        note = _read(path, state)
        if state.st_size <= _SMALL and (note is None or note.bytes != state.st_size):
            hash_and_leave(folder, path)


def is_note(path: Path) -> bool:
    """Return True if a file of a save is a note, and not part of the checkpoint."""
    return path.name.endswith(_SUFFIX)


def without_file(folder: Path) -> bool:
    """Return True if a note has no file."""
    return any(is_note(path) and not _noted(path).exists() for path in disk.files(folder))


def require_readable(folder: Path) -> None:
    """Read each note, because `entries` ignores a note that cannot be read.

    Raises:
        OSError: a note cannot be read, though the note may be intact.
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
    """Return the entries of the manifest for `files`, without a checksum where no note is left.

    Raises:
        OSError: a file is missing.
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
    """Remove all notes, once the manifest has the checksums. A note that cannot be removed stays."""
    with contextlib.suppress(OSError):
        for path in list(disk.files(folder)):
            if is_note(path):
                with contextlib.suppress(OSError):
                    path.unlink()


def _is_newer(written: Path, state: os.stat_result) -> bool:
    """Return True if a file with checksums was written after the file with this state."""
    try:
        return written.stat().st_mtime_ns >= state.st_mtime_ns
    except OSError:
        return False


def _read(path: Path, state: os.stat_result) -> _ChecksumNote | None:
    """Return the note of the file with this state; None for a note of an earlier file of the same name."""
    note = path.with_name(f"{path.name}{_SUFFIX}")
    if not _is_newer(note, state):
        return None
    try:
        text = disk.read(note, _LARGEST)
        return msgspec.json.decode(text, type=_ChecksumNote)
    except (OSError, msgspec.MsgspecError):
        return None


def _of_earlier_call(folder: Path) -> Mapping[str, _ChecksumNote]:
    """Return the entries of a manifest whose call did not come to rename the folder."""
    if not (folder / naming.MANIFEST).exists():
        return {}
    try:
        files = manifest.read(folder).files
    except CheckpointError:
        return {}
    return {
        entry.path: _ChecksumNote(entry.bytes, entry.xxh3_128, entry.xxh3_128_blocks)
        for entry in files
        if entry.xxh3_128 is not None
    }
