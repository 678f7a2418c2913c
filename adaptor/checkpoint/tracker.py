"""The tracker, the file that names the step which the framework loads, and the steps of a save folder.

The tracker is replaced atomically, under the lock of the save folder. The tracker goes backwards only from a
checkpoint that is damaged, gone, or not whole on every node (`tracker_rollback`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from adaptor.checkpoint import disk, manifest
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming

# In bytes: a step, with spaces and line ends that a person may have added.
_LONGEST_TRACKER = 256


def tracked_step(root: Path) -> int | None:
    """Return the step in the tracker; None if it is missing, empty, damaged, or says `release`."""
    text = tracker_text(root)
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def tracker_text(root: Path) -> str:
    """Return the text of the tracker; "" if missing, unreadable, or too long."""
    try:
        return disk.read(root / naming.TRACKER, _LONGEST_TRACKER).decode().strip()
    except (OSError, ValueError):
        return ""


@disk.one_line
def advance(root: Path, step: int) -> bool:
    """Let the tracker name `step`, unless it names a later step; return True if changed.

    `release` (a converted model to start from) counts as older than any step: the framework replaces it as
    well.
    """
    with locked(root):
        return advance_under_lock(root, step)


def advance_under_lock(root: Path, step: int) -> bool:
    """Do what `advance` does, under a lock that is held."""
    named = tracked_step(root)
    if named is not None and named >= step:
        return False
    set_under_lock(root, step)
    return True


def set_under_lock(root: Path, step: int) -> None:
    """Let the tracker name `step`, whatever it names, under a lock that is held."""
    remove_drafts(root)  # of a process that died with the lock
    tracker = root / naming.TRACKER
    if tracker.is_dir() and not tracker.is_symlink():  # a file cannot replace a folder
        tracker.rename(disk.free_name(root, lambda number: f"aside_{naming.TRACKER}.{number}"))
    disk.replace(root, naming.TRACKER, str(step).encode())


def remove_drafts(root: Path, names: Iterable[str] = (naming.TRACKER, naming.LEASE)) -> None:
    """Remove the drafts of small files that dead processes have left, under a lock that is held."""
    for name in names:
        for draft in root.glob(f"{name}.*{disk.DRAFT}"):
            disk.remove(draft)


def entry_names(root: Path) -> list[str]:
    """Return the names in the save folder, in order; empty if the folder is missing."""
    return sorted(path.name for path in root.iterdir()) if disk.is_folder(root) else []


def steps(root: Path) -> list[int]:
    """Return the steps with a folder, in order."""
    return sorted(step for name in entry_names(root) if (step := naming.step_of(name)) is not None)


def has_manifest(root: Path, step: int) -> bool:
    """Return True if the checkpoint of `step` was saved with the adaptor, intact or not."""
    return os.path.lexists(root / naming.final_name(step) / naming.MANIFEST)


def is_complete(root: Path, step: int) -> bool:
    """Return True if `iter_N` is a checkpoint that can be loaded.

    A checkpoint is complete if its manifest agrees with its files, or if the tracker names the step, or a
    later step. Checksums are not computed again: a manifest gets a final name only after every file was on
    disk.
    """
    folder = root / naming.final_name(step)
    if not disk.is_folder(folder):
        return False
    if not manifest.defects(folder, checksums=False, step=step):
        return True
    named = tracked_step(root)
    return named is not None and named >= step


def is_of_generation(root: Path, step: int, generation: str) -> bool:
    """Return True if a complete checkpoint of `step` by this generation of workers exists."""
    return _generation_of(root / naming.final_name(step)) == generation and is_complete(root, step)


def are_last_words(root: Path, step: int) -> bool:
    """Return True if the checkpoint of `step` was written after a failure: its manifest names the groups."""
    try:
        return bool(manifest.read(root / naming.final_name(step)).groups)
    except CheckpointError:
        return False


def _generation_of(folder: Path) -> str:
    """Return the generation of workers that made a checkpoint; "" if the framework alone made it."""
    try:
        return manifest.read(folder).generation
    except CheckpointError:
        return ""
