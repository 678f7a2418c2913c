"""Replaces a checkpoint by a checkpoint in other parallel sizes, made from the former, which is kept.

Invariant: the former checkpoint is never removed. At any moment the final name of the step belongs to a
complete checkpoint. Where the file system cannot exchange two names, the name is unused for a moment; after a
crash in this moment the next start gives the name back to the kept checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from adaptor.checkpoint import disk, linux_calls, tracker
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.protocol import naming

# The name of the new checkpoint during the exchange: the final name, and the inode of the new checkpoint. So
# after a crash the next start knows which of the two it has.
_EXCHANGED = re.compile(r"(iter_[0-9]{7,18})\.([0-9]{1,20})")


@disk.one_line
def put_in_place(root: Path, step: int, complete_folder: Path) -> Path:
    """Give `complete_folder` the final name of `step`, and return the new path of the former checkpoint.

    Args:
        root: the save folder.
        step: of both checkpoints.
        complete_folder: a complete checkpoint below `reshape_name(step)`, under the final name; all of it is
            on disk.

    Raises:
        CheckpointError: the disk refuses, or another process holds the lock.
    """
    final = root / naming.final_name(step)
    with locked(root):
        kept = _kept(root, step)
        beside_path = complete_folder.with_name(f"{complete_folder.name}.{complete_folder.stat().st_ino}")
        complete_folder.rename(beside_path)
        if linux_calls.exchange(beside_path, final):
            disk.sync(root)
            disk.sync(beside_path.parent)
            beside_path.rename(kept)
        else:
            final.rename(kept)
            beside_path.rename(final)
        disk.sync(root)
    return kept


def restore(root: Path) -> None:
    """Finish an exchange that a crash has interrupted.

    The former checkpoint is kept; the checkpoint that the tracker names gets its name back.

    Raises:
        OSError: the disk refuses.
        CheckpointError: another process holds the lock.
    """
    if not (_is_lost(root) or any(_beside(root))):
        return
    with locked(root):
        step = tracker.tracked_step(root)
        if step is not None and _is_lost(root):
            newest = naming.before_reshape_name(step, max(_numbers(root, step)))
            (root / newest).rename(root / naming.final_name(step))
        for step, beside_path, inode in _beside(root):
            is_made = beside_path.stat().st_ino == inode
            beside_path.rename(
                beside_path.with_name(naming.final_name(step)) if is_made else _kept(root, step)
            )
        disk.sync(root)


def _is_lost(root: Path) -> bool:
    """Return True if the checkpoint that the tracker names is missing, and a kept one exists."""
    step = tracker.tracked_step(root)
    return step is not None and not (root / naming.final_name(step)).exists() and bool(_numbers(root, step))


def _beside(root: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield interrupted exchanges: step, path, inode of the new checkpoint."""
    for staging in (root / name for name in tracker.entry_names(root) if naming.is_reshape(name)):
        for exchanged_match in filter(None, map(_EXCHANGED.fullmatch, tracker.entry_names(staging))):
            step = naming.step_of(exchanged_match[1])
            if step is not None:
                yield step, staging / exchanged_match[0], int(exchanged_match[2])


def _kept(root: Path, step: int) -> Path:
    """Return the next free name for a kept checkpoint."""
    return root / naming.before_reshape_name(step, max(_numbers(root, step), default=0) + 1)


def _numbers(root: Path, step: int) -> list[int]:
    """Return the numbers of the kept checkpoints of `step`."""
    numbered = filter(None, map(naming.before_reshape, tracker.entry_names(root)))
    return [number for of, number in numbered if of == step]
