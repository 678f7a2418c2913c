"""The steps that a save folder has: which are complete, and which generation of workers has saved them."""

from __future__ import annotations

import os
from pathlib import Path

from adaptor.checkpoint import disk, manifest, tracker
from adaptor.errors import CheckpointError
from adaptor.protocol import naming


def names(root: Path) -> list[str]:
    """Return what is in the save folder, in order; nothing where it is not there."""
    return sorted(path.name for path in root.iterdir()) if disk.is_folder(root) else []


def steps(root: Path) -> list[int]:
    """Return the steps that have a folder, in order."""
    return sorted(step for name in names(root) if (step := naming.step_of(name)) is not None)


def has_manifest(root: Path, step: int) -> bool:
    """Return whether the checkpoint of `step` was saved with the adaptor, intact or not."""
    return os.path.lexists(root / naming.final_name(step) / naming.MANIFEST)


def is_complete(root: Path, step: int) -> bool:
    """Return whether `iter_N` is a checkpoint that can be loaded.

    It is when its manifest agrees with its files, or when the tracker names it already, or a later one.
    Checksums are not computed again: a manifest goes under a final name only after every file was on disk.
    """
    folder = root / naming.final_name(step)
    if not disk.is_folder(folder):
        return False
    if not manifest.defects(folder, checksums=False, step=step):
        return True
    named = tracker.tracked_step(root)
    return named is not None and named >= step


def is_of_generation(root: Path, step: int, generation: str) -> bool:
    """Return True if there is a complete checkpoint of `step` by this generation of workers."""
    return _generation_of(root / naming.final_name(step)) == generation and is_complete(root, step)


def are_last_words(root: Path, step: int) -> bool:
    """Return whether the checkpoint of `step` was written after a failure: its manifest names the groups."""
    try:
        return bool(manifest.read(root / naming.final_name(step)).groups)
    except CheckpointError:
        return False


def _generation_of(folder: Path) -> str:
    """Return the generation of workers that made a checkpoint; empty if the framework alone made it."""
    try:
        return manifest.read(folder).generation
    except CheckpointError:
        return ""
