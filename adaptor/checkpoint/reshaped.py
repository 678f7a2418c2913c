"""Puts a checkpoint in other parallel sizes in the place of the one that it was made from, which is kept.

Invariant: what it was made from is never removed. At any moment the final name of the step belongs to a
complete checkpoint. Where the filesystem cannot exchange two names, it belongs to nothing for a moment; where
a crash leaves nothing there, the next start gives the kept one its name back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from adaptor.checkpoint import disk, linux_calls, tracker
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.protocol import naming

# Beside what is made, for as long as the exchange takes: the final name, and the inode of what is made. So
# whoever finds it after a crash knows which of the two it is.
_EXCHANGED = re.compile(r"(iter_[0-9]{7,18})\.([0-9]{1,20})")


@disk.one_line
def put_in_place(root: Path, step: int, complete_folder: Path) -> Path:
    """Give `complete_folder` the final name of `step`, and return where the checkpoint that had it is kept.

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
    """Bring to an end what a crash has left between two names.

    What was exchanged is kept; what the tracker names gets its name back.

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
    """Return whether the checkpoint that the tracker names is not there, and one that was kept is."""
    step = tracker.tracked_step(root)
    return step is not None and not (root / naming.final_name(step)).exists() and bool(_numbers(root, step))


def _beside(root: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield what a crash has left in the middle of an exchange: step, place, inode of what was made."""
    for staging in (root / name for name in tracker.entry_names(root) if naming.is_reshape(name)):
        for exchanged_match in filter(None, map(_EXCHANGED.fullmatch, tracker.entry_names(staging))):
            step = naming.step_of(exchanged_match[1])
            if step is not None:
                yield step, staging / exchanged_match[0], int(exchanged_match[2])


def _kept(root: Path, step: int) -> Path:
    """Return the name of what is kept next."""
    return root / naming.before_reshape_name(step, max(_numbers(root, step), default=0) + 1)


def _numbers(root: Path, step: int) -> list[int]:
    """Return the numbers of the checkpoints of `step` that are kept."""
    numbered = filter(None, map(naming.before_reshape, tracker.entry_names(root)))
    return [number for of, number in numbered if of == step]
