"""A checkpoint of `torch.distributed.checkpoint` without a collective: every writer writes a part.

Writer R makes a data file, `__R_0.distcp`, and its part of the metadata, `.metadata.R`: its plan and the
place of each item. The agent that publishes joins the parts to `.metadata`, as torch's coordinator would
after a gather, and lets torch's planner check that nothing is missing.

`integrity.json`, which Megatron-LM checks at a load with `--verify-integrity` (since core 0.17), has the
SHA-256 of files of a checkpoint. For last words each writer hashes its files on their way, and reads once the
files that several ranks have written; the digests go into a part, `.integrity.R`, which is joined likewise.
For a regular save the framework writes the file. `transform` writes the file if the source has one, or was
saved with the option.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import msgspec

from adaptor.checkpoint import disk, hashing, manifest
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol.naming import FileEntry

if TYPE_CHECKING:
    import torch

METADATA = ".metadata"
_PART = f"{METADATA}."
INTEGRITY = "integrity.json"
_INTEGRITY_PART = ".integrity."
_ALGORITHM = "sha256"
_SLICE = 4 << 20  # bytes of one read
_Write = Callable[[HashingFile], object]


@dataclass(frozen=True)
class _Known:
    """A part: the SavePlan of a writer, its WriteResults, and what Megatron-core's planner adds."""

    plan: Any
    results: Sequence[Any]
    extra: Mapping[str, Any] | None


class RankPart:
    """The part of a checkpoint that one rank writes, from a SavePlanner that has its state dict."""

    def __init__(self, rank: int, planner: Any) -> None:
        self.data_file = f"__{rank}_0.distcp"
        self.part_file = f"{_PART}{rank}"
        self._planner = planner
        self._plan = planner.create_local_plan()
        self._results: list[Any] = []

    @property
    def has_data(self) -> bool:
        """Return True if this rank has data to write."""
        return bool(self._plan.items)

    def write_data(self, file: HashingFile) -> None:
        """Write the rank's tensors and objects into `file`, one after the other."""
        import torch
        from torch.distributed.checkpoint.planner import WriteItemType

        for item in self._plan.items:
            start = file.bytes
            data = self._planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                file.write(data.getbuffer())
            else:
                torch.save(by_itself(data), cast(Any, file))
            self.note(item, start, file.bytes - start)

    def contents(self) -> list[tuple[Any, Any]]:
        """Return the items of the plan, each with its tensor or its BytesIO, in the order of the file."""
        return [(item, self._planner.resolve_data(item)) for item in self._plan.items]

    def note(self, item: Any, start: int, length: int) -> None:
        """Note the place and the length of an item in the data file, in bytes."""
        from torch.distributed.checkpoint.filesystem import _StorageInfo
        from torch.distributed.checkpoint.storage import WriteResult

        self._results.append(WriteResult(item.index, length, _StorageInfo(self.data_file, start, length)))

    def write_part(self, file: HashingFile) -> None:
        """Write the rank's part of the metadata; call it after `write_data`."""
        from torch.distributed.checkpoint.planner import SavePlan

        # A planner's own kind of plan is unknown where the parts are joined.
        plan = SavePlan(items=list(self._plan.items))
        plan_and_results = (plan, tuple(self._results), getattr(self._plan, "mcore_data", None))
        file.write(pickle.dumps(plan_and_results))


def by_itself(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on the host in memory of its own: torch would save all memory behind a view."""
    tensor = tensor.detach().cpu()
    return tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor


def import_torch() -> None:
    """Import the modules of torch for `join`: half a second of CPU time, more on a slow disk."""
    from torch.distributed.checkpoint import default_planner, filesystem  # noqa: F401


def join(folder: Path, entries: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """Join the parts of the metadata and of `integrity.json`, if any; return the files of the checkpoint.

    Parts in folders below make a checkpoint in each. A call may be repeated after a crash. A part is read
    only if it equals its writer's report bit for bit. Raises CheckpointError if it does not, or the parts do
    not make a whole.
    """
    by_parent: dict[PurePosixPath, list[FileEntry]] = {}
    for entry in entries:
        path = PurePosixPath(entry.path)
        by_parent.setdefault(path.parent, []).append(replace(entry, path=path.name))
    return tuple(
        replace(entry, path=str(parent / entry.path))
        for parent, inside in by_parent.items()
        for entry in _joined(
            folder / parent,
            _joined(folder / parent, tuple(inside), _PART, METADATA, _join_metadata),
            _INTEGRITY_PART,
            INTEGRITY,
            _join_integrity,
        )
    )


def _joined(
    folder: Path,
    entries: tuple[FileEntry, ...],
    prefix: str,
    name: str,
    join_parts: Callable[[Path, Sequence[FileEntry]], None],
) -> tuple[FileEntry, ...]:
    """Return `entries` with the file `name` in place of its parts, the names of which begin with `prefix`."""
    parts = [entry for entry in entries if entry.path.startswith(prefix)]
    if not parts:
        return entries
    joined = folder / name
    if not joined.exists():  # the file gets its name when complete
        problems = manifest.compare(folder, [replace(part, path=part.draft) for part in parts])
        if problems:
            raise CheckpointError(f"{problems[0]}: it was reported as written")
        join_parts(folder, parts)
    entry = FileEntry(name, joined.stat().st_size, hashing.hash_file(joined))
    return (*(other for other in entries if other not in parts), entry)


def _join_metadata(folder: Path, parts: Sequence[FileEntry]) -> None:
    # Files that the ranks of this job have written a moment ago, by checksum.
    ordered = sorted(parts, key=lambda part: int(part.path.removeprefix(_PART)))
    _finish(folder, [_Known(*pickle.loads((folder / part.draft).read_bytes())) for part in ordered])


def _finish(folder: Path, parts: Sequence[_Known]) -> None:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        _, metadata = planner.create_global_plan([part.plan for part in parts])
    except ValueError as error:
        raise CheckpointError(f"{folder}: the parts do not make a whole ({error})") from error
    extras = [part.extra for part in parts if part.extra is not None]
    if extras:  # the place up to Megatron-core 0.16
        vars(metadata)["mcore_data"] = dict(chain.from_iterable(extra.items() for extra in extras))
    FileSystemWriter(str(folder)).finish(metadata, [list(part.results) for part in parts])


class Integrity(msgspec.Struct):
    """The content of `integrity.json`: digests in hexadecimal, by the names of files."""

    algorithm: str
    files: dict[str, str]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def sha256() -> hashlib._Hash:
    """Return an empty digest of the kind in `integrity.json`."""
    return hashlib.new(_ALGORITHM)


def with_integrity_part(
    files: Mapping[str, _Write], rank: int, other_digests: Mapping[str, Callable[[], str]] | None = None
) -> dict[str, _Write]:
    """Return the files of writer `rank`, and behind them the part with the digests of all others.

    `other_digests` has for each earlier file a function that returns the digest in hexadecimal.
    """
    digests: dict[str, str] = {}

    def digested(name: str, write: _Write) -> _Write:
        def act(file: HashingFile) -> None:
            file_digest = sha256()
            file.also(file_digest.update)
            write(file)
            digests[name] = file_digest.hexdigest()

        return act

    def write_part(file: HashingFile) -> None:
        hex_digests = {name: hexdigest() for name, hexdigest in (other_digests or {}).items()}
        file.write(msgspec.json.encode(Integrity(_ALGORITHM, hex_digests | digests)))

    parts = {
        name: write if name.startswith(METADATA) else digested(name, write) for name, write in files.items()
    }
    parts[f"{_INTEGRITY_PART}{rank}"] = write_part
    return parts


def _join_integrity(folder: Path, parts: Sequence[FileEntry]) -> None:
    digests: dict[str, str] = {}
    for part in parts:
        digests |= decode_integrity((folder / part.draft).read_bytes(), folder / part.draft).files
    disk.replace(folder, INTEGRITY, integrity_content(folder, digests, [METADATA]))


def integrity_content(folder: Path, digests: Mapping[str, str], other_names: Sequence[str]) -> bytes:
    """Return the content of `integrity.json`, for a checkpoint that is complete but for this file.

    `digests`: of files that were hashed while written; `other_names`: further, small files.
    """
    all_digests = {**digests, **{name: _sha256(folder / name) for name in other_names}}
    return Integrity(_ALGORITHM, dict(sorted(all_digests.items()))).encode()


def decode_integrity(text: bytes, path: Path) -> Integrity:
    """Return the digests in the `text` of the file at `path`. Raises CheckpointError."""
    try:
        return msgspec.json.decode(text, type=Integrity)
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: has no digests of files ({error})") from error


def _sha256(path: Path) -> str:
    file_digest = sha256()
    with os.fdopen(disk.open_regular(path), "rb", buffering=0) as file:
        while piece := file.read(_SLICE):
            file_digest.update(piece)
    return file_digest.hexdigest()
