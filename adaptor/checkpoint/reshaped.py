"""Puts a checkpoint in other parallel sizes in the place of the one that it was made from, which is kept.

Invariant: what it was made from is never removed. At any moment the final name of the step belongs to a
complete checkpoint, or to nothing; where a crash leaves nothing there, the next start gives the kept one its
name back.
"""

from __future__ import annotations

from pathlib import Path

from adaptor.checkpoint import disk, saved_steps, tracker
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.protocol import naming


@disk.one_line
def put_in_place(root: Path, step: int, made: Path) -> Path:
    """Give `made` the final name of `step`, and return where the checkpoint that had it is kept.

    Args:
        root: the save folder.
        step: of both checkpoints.
        made: a complete checkpoint on the same file system; all of it is on disk.

    Raises:
        CheckpointError: the disk refuses, or another process holds the lock.
    """
    final = root / naming.final_name(step)
    with locked(root):
        kept = root / naming.before_reshape_name(step, max(_numbers(root, step), default=0) + 1)
        final.rename(kept)
        made.rename(final)
        disk.sync(root)
    return kept


def restore(root: Path) -> None:
    """Give the checkpoint that the tracker names its name back, where a crash came between the two renames.

    Raises:
        OSError: the disk refuses.
        CheckpointError: another process holds the lock.
    """
    step = tracker.tracked_step(root)
    if step is None or (root / naming.final_name(step)).exists() or not _numbers(root, step):
        return
    with locked(root):
        final, numbers = root / naming.final_name(step), _numbers(root, step)
        if numbers and not final.exists():
            (root / naming.before_reshape_name(step, max(numbers))).rename(final)
            disk.sync(root)


def _numbers(root: Path, step: int) -> list[int]:
    """Return the numbers of the checkpoints of `step` that are kept."""
    found = filter(None, map(naming.before_reshape, saved_steps.names(root)))
    return [number for of, number in found if of == step]
