"""Checks whether files are a whole checkpoint: a disk of one node has only the files that its ranks have
written.

In the format `torch_dist` the metadata names all files; in the format `torch` the layout file names the
folders of all model-parallel ranks. Without either the files count as whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from adaptor.checkpoint import dcp, disk, layout_file
from adaptor.checkpoint.manifest import Manifest, UnreadableError
from adaptor.errors import CheckpointError
from adaptor.protocol import naming

# The names of files in the pickle, which has them as plain text and is not loaded.
_NAMED = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_LARGEST = 1 << 30
_SHARDS, _MODEL_PARALLEL = ".distcp", "mp_rank_"


def missing(folder: Path, paths: Iterable[str]) -> str:
    """Return a needed file or folder that is not among `paths`; '' if all are present.

    Args:
        folder: of the checkpoint, with the metadata or the layout file.
        paths: of files, below the folder.

    Raises:
        CheckpointError: the metadata are gone.
        UnreadableError: the disk does not answer as it should.
    """
    have = set(paths)
    if dcp.METADATA in have:
        needed_files, present_files = _named(folder), have
    elif any(path.endswith(_SHARDS) for path in have):
        return dcp.METADATA
    elif names_folders(have):
        needed_files, present_files = _folders(folder), {path.partition("/")[0] for path in have}
    else:
        return ""
    return min(needed_files - present_files, default="")


def names_files(paths: Iterable[str]) -> bool:
    """Return whether the files include the metadata that name all files of ranks."""
    return dcp.METADATA in paths


def names_folders(paths: Iterable[str]) -> bool:
    """Return whether the files include a layout file, which names all ranks' folders (format `torch`)."""
    have = set(paths)
    return naming.LAYOUT in have and any(path.startswith(_MODEL_PARALLEL) for path in have)


def is_part(folder: Path, saved_manifest: Manifest) -> bool:
    """Return whether the folder of a checkpoint has only the files that some ranks have saved, or load.

    Args:
        folder: of the checkpoint.
        saved_manifest: its manifest.

    Raises:
        UnreadableError: the disk does not answer as it should.
    """
    return saved_manifest.part or bool(missing(folder, [file.path for file in saved_manifest.files]))


def require(folder: Path, paths: Iterable[str]) -> None:
    """Refuse files that are no whole checkpoint; the arguments are as in `missing`.

    Raises:
        CheckpointError: names the missing file or folder.
    """
    if name := missing(folder, paths):
        raise CheckpointError(
            f"{folder}: {name} is missing, so the store does not get this checkpoint: it is on the disk of a"
            " node that has not sent its files; with a --save folder that all nodes share this cannot happen"
        )


def _named(folder: Path) -> set[str]:
    path = folder / dcp.METADATA
    try:
        return {name.decode() for name in _NAMED.findall(disk.read(path, _LARGEST))}
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror or error})") from None


def _folders(folder: Path) -> set[str]:
    try:
        return layout_file.folders(folder / naming.LAYOUT)
    except CheckpointError:
        return set()  # damaged: its checksum tells
