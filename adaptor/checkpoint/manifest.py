"""The manifest of a checkpoint folder: files and checksums, and which of the files a node needs and has.

A node with a disk of its own may have only a part of the checkpoint that rank 0 sees, or another save of the
step: `read_if_intact`, `other_save_problem`, `own_files`, `missing_from_part`.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Annotated, NoReturn

import msgspec
import xxhash

from adaptor.checkpoint import disk, hashing
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.verification.agreed_state import AgreedState

FORMAT = 1
# The largest manifest that is read, in bytes; 100,000 files take 15 MB.
LARGEST = 64 << 20


@dataclass(frozen=True)
class Manifest:
    """The contents of a complete checkpoint folder, its writers and its time (UTC, ISO 8601).

    Attributes:
        generation: of the workers at that time, from one start of all workers to the next; "" if unknown
        part: whether a node has saved the manifest on a disk of its own, without the files of other nodes
        state: the sums of the state in memory on which its holders agreed; None: no agreed sums
    """

    step: int
    files: tuple[FileEntry, ...]
    groups: Mapping[str, object]
    world_size: int
    created: str
    generation: str = ""
    part: bool = False
    state: AgreedState | None = None

    @classmethod
    def now(
        cls,
        step: int,
        files: Iterable[FileEntry],
        groups: Mapping[str, object],
        world_size: int,
        generation: str = "",
        *,
        part: bool = False,
        state: AgreedState | None = None,
    ) -> Manifest:
        """Return a manifest with the current time; `files` are sorted by path."""
        created = datetime.now(timezone.utc).isoformat(timespec="microseconds")
        ordered = tuple(sorted(files, key=lambda f: f.path))
        return cls(step, ordered, groups, world_size, created, generation, part, state)

    def encode(self) -> bytes:
        """Return the JSON text of the manifest file."""
        files = {f.path: _described(f) for f in self.files}
        body = {
            "format": FORMAT,
            "step": self.step,
            "created": self.created,
            "generation": self.generation,
            "world_size": self.world_size,
            "groups": dict(self.groups),
            "files": files,
        }
        if self.part:
            body["part"] = True
        if self.state is not None:
            body["state"] = msgspec.to_builtins(self.state)
        body[_OWN_CHECKSUM] = _checksum(body)
        return (json.dumps(body, indent=1) + "\n").encode()


# The key of the checksum of all other content: a damaged name of an optional key would not be noticed.
_OWN_CHECKSUM = "xxh3_128"


def _checksum(body: Mapping[str, object]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body).encode()))


def _described(file: FileEntry) -> dict[str, object]:
    described_file: dict[str, object] = {"bytes": file.bytes, "xxh3_128": file.xxh3_128}
    for name in ("xxh3_128_blocks", "tracker"):
        if (value := getattr(file, name)) is not None:
            described_file[name] = value
    return described_file


class UnreadableError(CheckpointError):
    """The manifest exists, but cannot be read; the error says nothing about the checkpoint."""


class Unreadable(str):
    """A problem that says nothing about the file: the machine or the file system prevents the read."""


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class _File(msgspec.Struct):
    bytes: _Count
    xxh3_128: str | None
    xxh3_128_blocks: str | None = None
    tracker: str | None = None


class _Body(msgspec.Struct):
    """The content of a manifest file, besides its format."""

    step: _Count
    files: dict[str, _File]
    groups: dict[str, object]
    world_size: _Count
    created: str
    generation: str = ""  # not written by earlier versions
    part: bool = False
    state: AgreedState | None = None


def read(folder: Path) -> Manifest:
    """Return the manifest of `folder`. Raises CheckpointError; UnreadableError: the system cannot tell."""
    path = folder / naming.MANIFEST
    try:
        text = disk.read(path, LARGEST)
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror})") from error
    return decode(text, str(path))


def decode(text: bytes, path: str) -> Manifest:
    """Return the manifest of the file at `path` with this content. Raises CheckpointError."""
    try:
        parsed_body = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
        if isinstance(parsed_body, dict) and parsed_body.get("format", FORMAT) != FORMAT:
            raise CheckpointError(
                f"{path}: format {parsed_body['format']!r}; this version reads format {FORMAT}"
            )
        body = msgspec.convert(parsed_body, _Body)
        files = tuple(
            FileEntry(
                name,
                described_file.bytes,
                described_file.xxh3_128,
                xxh3_128_blocks=described_file.xxh3_128_blocks,
                tracker=described_file.tracker,
            )
            for name, described_file in body.files.items()
        )
        require_inside(files)
        own_checksum = parsed_body.pop(_OWN_CHECKSUM, None)
        if own_checksum not in (None, _checksum(parsed_body)):  # None: of an earlier version
            raise CheckpointError(f"{path}: was changed after it was written: its own checksum differs")
    # RecursionError: thousands of brackets.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not a manifest ({error})") from error
    described = (body.step, files, body.groups, body.world_size, body.created, body.generation)
    return Manifest(*described, body.part, body.state)


def require_inside(files: Iterable[FileEntry]) -> None:
    """Raise ValueError for names that lead out of the checkpoint folder, or that no file can have."""
    for entry in files:
        if not _is_inside(entry.path):
            raise ValueError(f"{entry.path!r} is no name of a file below the folder")
        if entry.tracker is not None and not (_is_inside(entry.tracker) and "/" not in entry.tracker):
            raise ValueError(f"{entry.tracker!r} is no name of a file in the save folder")


def _is_inside(name: str) -> bool:
    parts = PurePosixPath(name).parts
    has_parts = bool(parts) and parts[0] != "/" and ".." not in parts
    return has_parts and "\0" not in name and _is_encodable(name)


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{name} is not a number")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuse a repeated key: of two files with the same name only the last would be checked."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key is there twice")
    return dict(pairs)


def defects(folder: Path, *, checksums: bool = True, step: int | None = None) -> list[str]:
    """Compare the checkpoint in `folder` with its manifest; return one line for each problem.

    Files that are not in the manifest are ignored. Without `checksums` only presence and sizes are compared.
    `step`: the expected step, if known.
    """
    try:
        manifest = read(folder)
    except CheckpointError as error:
        return [str(error)]
    if step is not None and manifest.step != step:
        return [f"{folder / naming.MANIFEST}: is not that of step {step}"]
    if not manifest.files:
        return [f"{folder / naming.MANIFEST}: names no file"]
    return compare(folder, manifest.files, checksums=checksums)


@dataclass(frozen=True)
class Examined:
    """A file of a checkpoint, compared with its entry in the manifest.

    Attributes:
        state: ok; unhashed if the manifest has no checksum and the size is right; missing; changed;
            unreadable if the file may be intact
        problem: a line for people; "" without a problem
    """

    entry: FileEntry
    state: str
    problem: str = ""


def examine(folder: Path, entry: FileEntry, *, checksums: bool = True) -> Examined:
    """Compare a file of the checkpoint with its `entry`; without `checksums` presence and size only."""
    path = folder / entry.path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return Examined(entry, "changed", f"{path}: is not a regular file")
        if status.st_size != entry.bytes:
            line = f"{path}: {status.st_size} bytes, the manifest says {entry.bytes}"
            return Examined(entry, "changed", line)
        if not checksums or (entry.xxh3_128 is None and entry.xxh3_128_blocks is None):
            return Examined(entry, "unhashed")
        if not hashing.has_content_of(path, entry):
            return Examined(entry, "changed", f"{path}: checksum differs from the manifest")
    except FileNotFoundError:
        return Examined(entry, "missing", f"{path}: missing")
    except ValueError as error:  # a path that no file can have
        return Examined(entry, "changed", f"{path}: cannot be read ({error})")
    except OSError as error:
        line = f"{path}: cannot be read ({error.strerror or error})"
        return Examined(entry, "changed" if disk.is_wrong(error) else "unreadable", line)
    return Examined(entry, "ok")


def compare(folder: Path, files: Iterable[FileEntry], *, checksums: bool = True) -> list[str]:
    """Return the problems of these `files`, like `defects`; `Unreadable` if a file may be intact."""
    examined = (examine(folder, entry, checksums=checksums) for entry in files)
    return [
        Unreadable(examined_file.problem) if examined_file.state == "unreadable" else examined_file.problem
        for examined_file in examined
        if examined_file.problem
    ]


def read_if_intact(folder: Path) -> Manifest | None:
    """Return the folder's own manifest; None if it is missing or damaged. Raises UnreadableError."""
    try:
        return read(folder)
    except UnreadableError:
        raise
    except CheckpointError:
        return None


def other_save_problem(folder: Path, generation: str) -> str:
    """Return a problem if the folder's own manifest is of another save of the step than rank 0's, else "".

    Each start of the workers is a `generation`, whose saves of a step are equal. Saves of earlier versions
    have no generation. Raises UnreadableError.
    """
    own_manifest = read_if_intact(folder)
    if (
        own_manifest is None
        or own_manifest.generation == generation
        or not own_manifest.generation
        or not generation
    ):
        return ""
    return f"{folder}: is of another save of this step than that of node 0"


def own_files(folder: Path, theirs: Sequence[FileEntry], generation: str) -> tuple[FileEntry, ...]:
    """Return the folder's own files, if its manifest is of the same save, with other files than rank 0's.

    Empty if both have the same files, or if the folder must have all files (`torch_dist`, of which ranks may
    read any file): then it is compared with the files of rank 0. Raises UnreadableError.
    """
    own_manifest, known_files = read_if_intact(folder), {file.path: file for file in theirs}
    if own_manifest is None:
        return ()
    is_same = (
        naming.final_name(own_manifest.step) == folder.name and own_manifest.generation == generation != ""
    )
    if not is_same or any(file.path.endswith(".distcp") for file in (*own_manifest.files, *theirs)):
        return ()
    if {file.path for file in own_manifest.files} == known_files.keys():
        return ()
    common = [(file, known_files[file.path]) for file in own_manifest.files if file.path in known_files]
    return own_manifest.files if all(may_be_same(*pair) for pair in common) else ()


def may_be_same(first: FileEntry, second: FileEntry) -> bool:
    """Return True if two entries may have the same content; two checksums are compared."""
    return first.bytes == second.bytes and len({first.xxh3_128, second.xxh3_128} - {None}) < 2


def may_have(files: Iterable[FileEntry], wanted: Iterable[FileEntry]) -> bool:
    """Return True if `files` may have the same content as `wanted`, or contain further files."""
    by_path = {file.path: file for file in files}
    return all(file.path in by_path and may_be_same(file, by_path[file.path]) for file in wanted)


def missing_from_part(
    folder: Path, part: Sequence[FileEntry], theirs: Sequence[FileEntry], loads: Sequence[str]
) -> list[str]:
    """Return a line for each file that a rank is about to load and a part lacks.

    `part` comes from `own_files`; `theirs` are the files of rank 0; `loads` are the beginnings of the loaded
    paths. An optimizer is needed only if rank 0 sees one, too: a job may save none.
    """
    have, names = {file.path for file in part}, {PurePosixPath(file.path).name for file in theirs}
    needed_paths = [
        path for path in loads if path.endswith(naming.MODEL_FILE) or PurePosixPath(path).name in names
    ]
    return [f"{folder / path}: missing" for path in needed_paths if path not in have]
