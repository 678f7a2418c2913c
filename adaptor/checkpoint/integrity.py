"""Writes `integrity.json`, which Megatron-LM checks at a load with `--verify-integrity` (since core 0.17).

The file has the SHA-256 of files of a checkpoint in the format `torch_dist`. For last words each writer
hashes its files on their way, and reads once the files that several ranks have written; the digests go into a
part, `.integrity.R`, and the agent that publishes joins the parts. For a regular save the framework writes
the file, and files that are removed before the checkpoint has its name are taken out. `transform` writes the
file if the source has one, or was saved with the option.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import xxhash

from adaptor.checkpoint import checksum_notes, dcp, disk, manifest
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol.file_entry import FileEntry

NAME = "integrity.json"
_PART = ".integrity."
_ALGORITHM = "sha256"
_LARGEST = 64 << 20  # bytes
_SLICE = 4 << 20
_Write = Callable[[HashingFile], object]


class _Integrity(msgspec.Struct):
    """The content of the file: digests in hexadecimal, by name."""

    algorithm: str
    files: dict[str, str]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def digest() -> hashlib._Hash:
    """Return an empty digest of the kind in the file, as `hashlib` makes it."""
    return hashlib.new(_ALGORITHM)


def with_part(
    files: Mapping[str, _Write], rank: int, other_digests: Mapping[str, Callable[[], str]] | None = None
) -> dict[str, _Write]:
    """Return the files of a writer, and behind them the part with the digests of all other files.

    Args:
        files: the files of the writer, by name.
        rank: names the part.
        other_digests: for each earlier file a function that returns the digest in hexadecimal.
    """
    digests: dict[str, str] = {}

    def digested(name: str, write: _Write) -> _Write:
        def act(file: HashingFile) -> None:
            file_digest = digest()
            file.also(file_digest.update)
            write(file)
            digests[name] = file_digest.hexdigest()

        return act

    def write_part(file: HashingFile) -> None:
        hex_digests = {name: hexdigest() for name, hexdigest in (other_digests or {}).items()}
        file.write(msgspec.json.encode(_Integrity(_ALGORITHM, hex_digests | digests)))

    parts = {
        name: write if name.startswith(dcp.METADATA) else digested(name, write)
        for name, write in files.items()
    }
    parts[f"{_PART}{rank}"] = write_part
    return parts


def join(folder: Path, entries: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Join the parts, if any, and return the files of the checkpoint; after `dcp.join`.

    A call may be repeated after a crash. A part is read only if it equals, bit for bit, its writer's report.

    Raises:
        CheckpointError: a part differs from its report.
    """
    parts = [entry for entry in entries if entry.path.startswith(_PART)]
    if not parts:
        return tuple(entries)
    joined = folder / NAME
    if not joined.exists():  # the file gets its name when complete
        problems = manifest.compare(folder, [replace(part, path=part.draft) for part in parts])
        if problems:
            raise CheckpointError(f"{problems[0]}: it was reported as written")
        all_digests: dict[str, str] = {}
        for part in parts:
            all_digests |= _decoded((folder / part.draft).read_bytes(), folder / part.draft).files
        all_digests[dcp.METADATA] = _hash(folder / dcp.METADATA)
        disk.replace(folder, NAME, _Integrity(_ALGORITHM, dict(sorted(all_digests.items()))).encode())
    content = joined.read_bytes()
    entry = FileEntry(NAME, len(content), xxhash.xxh3_128_hexdigest(content))
    return (*(file_entry for file_entry in entries if file_entry not in parts), entry)


def content(folder: Path, digests: Mapping[str, str], other_names: Sequence[str]) -> bytes:
    """Return the content of the file, for a checkpoint that is complete but for this file.

    Args:
        folder: of the checkpoint.
        digests: of files that were hashed while they were written, by name.
        other_names: the names of further files, which are small.
    """
    all_digests = {**digests, **{name: _hash(folder / name) for name in other_names}}
    return _Integrity(_ALGORITHM, dict(sorted(all_digests.items()))).encode()


def settle(folder: Path) -> None:
    """Take notes of checksums, which are no part of the checkpoint, out of the framework's own file.

    A missing file, or a file of unknown form, is not changed. Raises OSError.
    """
    path = folder / NAME
    if not path.exists():
        return
    try:
        recorded = _decoded(disk.read(path, _LARGEST), path)
    except CheckpointError:
        return
    kept = {name: digest for name, digest in recorded.files.items() if not checksum_notes.is_note(Path(name))}
    if kept != recorded.files:
        disk.replace(folder, NAME, _Integrity(recorded.algorithm, kept).encode())


def _decoded(text: bytes, path: Path) -> _Integrity:
    try:
        return msgspec.json.decode(text, type=_Integrity)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: has no digests of files ({error})") from error


def _hash(path: Path) -> str:
    file_digest = digest()
    with os.fdopen(disk.open_regular(path), "rb", buffering=0) as file:
        while piece := file.read(_SLICE):
            file_digest.update(piece)
    return file_digest.hexdigest()
