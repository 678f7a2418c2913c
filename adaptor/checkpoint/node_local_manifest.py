"""Says what a node's own folder has of the checkpoint that rank 0 sees: a part of it, or another save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from adaptor.checkpoint import manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry


def read(folder: Path) -> Manifest | None:
    """Return the folder's own manifest; None where there is none, or it is damaged.

    The files are compared with those of rank 0 then.

    Raises:
        UnreadableError: nobody can tell.
    """
    try:
        return manifest.read(folder)
    except manifest.UnreadableError:
        raise
    except CheckpointError:
        return None


def of_another_save(folder: Path, generation: str) -> str:
    """Return that the folder's own manifest is of another save of the step than that of rank 0; '' if not.

    Each start of the workers is a generation of its own, and what it saves of a step is always the same. What
    earlier versions have saved has no generation.

    Args:
        folder: of the checkpoint.
        generation: of the workers that have made what rank 0 sees.

    Raises:
        UnreadableError: nobody can tell.
    """
    own_manifest = read(folder)
    if (
        own_manifest is None
        or own_manifest.generation == generation
        or not own_manifest.generation
        or not generation
    ):
        return ""
    return f"{folder}: is of another save of this step than that of node 0"


def files(folder: Path, theirs: Sequence[FileEntry], generation: str) -> tuple[FileEntry, ...]:
    """Return the files of the folder's own manifest, where it is of the same save and has others than rank 0.

    Nothing where both have the same, or where the folder must have all, as in the format `torch_dist`, of
    which ranks may read any: then it is compared with the files of rank 0.

    Args:
        folder: of the checkpoint.
        theirs: the files in the manifest that rank 0 sees.
        generation: in that manifest.

    Raises:
        UnreadableError: nobody can tell.
    """
    own_manifest, known_files = read(folder), {file.path: file for file in theirs}
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
    return own_manifest.files if all(_may_be_same(*pair) for pair in common) else ()


def _may_be_same(first: FileEntry, second: FileEntry) -> bool:
    return first.bytes == second.bytes and len({first.xxh3_128, second.xxh3_128} - {None}) < 2


def lacks(
    folder: Path, part: Sequence[FileEntry], theirs: Sequence[FileEntry], loads: Sequence[str]
) -> list[str]:
    """Return what a part lacks, of which a rank is about to load what begins with `loads`; a line each.

    An optimizer is needed where rank 0 sees one, too: a job may save none.

    Args:
        folder: of the checkpoint.
        part: the files that are there, as `files` returns them.
        theirs: the files in the manifest that rank 0 sees.
        loads: with what the paths of files begin, below the folder.
    """
    have, names = {file.path for file in part}, {PurePosixPath(file.path).name for file in theirs}
    needed_paths = [
        path for path in loads if path.endswith(naming.MODEL_FILE) or PurePosixPath(path).name in names
    ]
    return [f"{folder / path}: missing" for path in needed_paths if path not in have]
