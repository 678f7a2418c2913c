"""The manifest of a checkpoint folder, and the file that hashes what is written through it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from adaptor.checkpoint import naming
from adaptor.errors import CheckpointError

FORMAT = 1

# Small enough that a slice is still in the cache when it is written after it was hashed, and that progress is
# reported several times a second on a slow disk.
_SLICE = 4 << 20
# What is written reaches the disk in stretches: one long fsync at the end would look like a halt. They begin
# with one slice, and grow as long as the disk takes each of them in a second.
_LONGEST = 256 << 20
_QUICK_S = 1.0


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    path      below the checkpoint folder, with `/`
    bytes     its size
    xxh3_128  in hexadecimal, None where only the size is known
    attempt   which attempt wrote it, while it has not been published; None when it has its name already
    """

    path: str
    bytes: int
    xxh3_128: str | None
    attempt: int | None = None

    @property
    def draft(self) -> str:
        """The path under which it was written; no two attempts write to the same."""
        return self.path if self.attempt is None else f"{self.path}.{self.attempt}"


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint folder holds, who wrote it and when (UTC, ISO 8601).

    generation  of the workers that were at work then, from one start of all of them to the next; empty where
                nobody has told it
    """

    step: int
    files: tuple[FileEntry, ...]
    groups: Mapping[str, Any]
    world_size: int
    created: str
    generation: str = ""

    @classmethod
    def now(
        cls,
        step: int,
        files: Iterable[FileEntry],
        groups: Mapping[str, Any],
        world_size: int,
        generation: str = "",
    ) -> Manifest:
        """A manifest created now; files are sorted by path."""
        created = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        ordered = tuple(sorted(files, key=lambda f: f.path))
        return cls(step, ordered, groups, world_size, created, generation)

    def encode(self) -> bytes:
        """The JSON text of the manifest file."""
        files = {f.path: {"bytes": f.bytes, "xxh3_128": f.xxh3_128} for f in self.files}
        body = {
            "format": FORMAT,
            "step": self.step,
            "created": self.created,
            "generation": self.generation,
            "world_size": self.world_size,
            "groups": dict(self.groups),
            "files": files,
        }
        return (json.dumps(body, indent=1) + "\n").encode()


def read(folder: Path) -> Manifest:
    """The manifest of `folder`.

    Raises CheckpointError when there is none, or when it cannot be understood.
    """
    path = folder / naming.MANIFEST
    try:
        body = json.loads(path.read_bytes(), object_pairs_hook=_without_duplicates)
        if body["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {body['format']}; this version reads format {FORMAT}")
        files = tuple(FileEntry(p, int(f["bytes"]), f["xxh3_128"]) for p, f in body["files"].items())
        return Manifest(
            int(body["step"]),
            files,
            body["groups"],
            int(body["world_size"]),
            body["created"],
            body.get("generation", ""),  # earlier versions did not write it
        )
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a manifest ({error!r})") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A file whose name was changed into that of another would go unchecked."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def verify(folder: Path, *, checksums: bool = True) -> list[str]:
    """What is wrong with the checkpoint in `folder`, one line each; an empty list when it can be trusted.

    Files that the manifest does not name are fine. Without `checksums` only presence and sizes are compared.
    """
    try:
        manifest = read(folder)
    except CheckpointError as error:
        return [str(error)]
    return compare(folder, manifest.files, checksums=checksums)


def compare(folder: Path, files: Iterable[FileEntry], *, checksums: bool = True) -> list[str]:
    """What is wrong with these files of the checkpoint in `folder`, like `verify`."""
    problems = []
    for entry in files:
        path = folder / entry.path
        try:
            size = path.stat().st_size
            if size != entry.bytes:
                problems.append(f"{path}: {size} bytes, the manifest says {entry.bytes}")
            elif checksums and entry.xxh3_128 is not None and hash_file(path) != entry.xxh3_128:
                problems.append(f"{path}: checksum differs from the manifest")
        except FileNotFoundError:
            problems.append(f"{path}: missing")
        except (OSError, ValueError) as error:  # ValueError: a path that no file can have
            problems.append(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})")
    return problems


def hash_file(path: Path) -> str:
    """The xxh3-128 of a file's content, in hexadecimal."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_SLICE):
            digest.update(piece)
    return digest.hexdigest()


class HashingFile:
    """A write-only binary file that hashes and counts what goes through it: `torch.save(obj,
    HashingFile(path))`.

    torch writes its archives front to back and never seeks (its writer refuses to), so one pass is enough.
    `progress` is called with the number of bytes of each slice written; what it raises ends the write.
    """

    def __init__(self, path: Path, progress: Callable[[int], None] = lambda count: None) -> None:
        self.path = path
        self.bytes = 0
        self._progress = progress
        self._failure: BaseException | None = None
        self._digest = xxhash.xxh3_128()
        self._file = path.open("wb", buffering=0)
        self._stretch = self._sync_at = _SLICE

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Writes all of `data`; returns its size in bytes. Raises OSError."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _SLICE):
                piece = view[start : start + _SLICE]
                self._digest.update(piece)
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
            if self.bytes >= self._sync_at:
                self._sync()
            piece = piece[count:]

    def _sync(self) -> None:
        began = time.monotonic()
        os.fdatasync(self._file.fileno())
        quick = time.monotonic() - began < _QUICK_S
        self._stretch = min(2 * self._stretch, _LONGEST) if quick else max(self._stretch // 2, _SLICE)
        self._sync_at = self.bytes + self._stretch

    def flush(self) -> None:
        """Nothing is held back; torch.save calls this."""

    def close(self) -> None:
        """Waits until every byte is on disk. Raises OSError."""
        if not self._file.closed:
            with self._file:
                os.fsync(self._file.fileno())

    def entry(self, path: str, attempt: int | None = None) -> FileEntry:
        """The entry for what was written, to be published under `path` relative to the checkpoint folder."""
        return FileEntry(path, self.bytes, self._digest.hexdigest(), attempt)

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
            # torch.save tries to finish the archive all the same, and reports only that this failed.
            raise self._failure
