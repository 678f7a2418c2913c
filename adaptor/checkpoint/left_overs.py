"""Removes the left-overs of dead processes in a save folder; neither a save nor a start waits for long.

Large folders are removed in a thread: a disk may need minutes for thousands of files.

Also replaces a checkpoint by a checkpoint in other parallel sizes, made from the former (`put_in_place`).
Invariant: the former checkpoint is never removed. At any moment the final name of the step belongs to a
complete checkpoint. Where the file system cannot exchange two names, the name is unused for a moment; after a
crash in this moment the next start gives the name back to the kept checkpoint (`restore_reshaped`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from adaptor import output
from adaptor.checkpoint import disk, tracker
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming

# Seconds that a save waits until useless folders are removed and their room is free. Thousands of files on a
# slow disk take longer: a thread goes on beside the save.
REMOVAL_WAIT_S = 2.0
# Seconds that a start waits for the removal of left-overs of earlier jobs. All other ranks wait for the
# start, some within time-outs of minutes; afterwards the removal goes on beside them.
_LEFT_OVER_S = 60.0
# The name of a new checkpoint in other sizes during its exchange with the former: the final name, and the
# inode of the new checkpoint. So after a crash the next start knows which of the two it has.
_EXCHANGED = re.compile(r"(iter_[0-9]{7,18})\.([0-9]{1,20})")


@disk.one_line
def clean(
    save_folder: Path, term: int | None = None, generation: str = "", *, saves: bool = True
) -> list[str]:
    """Remove left-overs of dead processes, and return the names; only called while no worker lives.

    Large folders are removed in a thread that outlives the call, if the removal takes long: a line says so.

    Args:
        term: given at the end of an incident: only folders of `generation`, made under the controller of
            `term`, are removed. Workers on the other side of a cut network may live and write for another
            controller. The framework's own unfinished saves (`regular_folder`) count as made under term 0.
        saves: False: regular saves stay, for the next start. If each node has its own disk, the next start
            renames on this node the saves that rank 0 has renamed on its own.
    """
    left_over: list[Path] = []
    removed: list[str] = []
    restore_reshaped(save_folder)
    for path in (save_folder / name for name in tracker.entry_names(save_folder)):
        if term is not None and not _is_left_by(path.name, term, generation):
            continue
        if not saves and naming.is_unfinished_save(path.name):
            continue
        step = naming.step_of_replaced(path.name)
        if step is not None and not (save_folder / naming.final_name(step)).exists():
            path.rename(save_folder / naming.final_name(step))
            disk.sync(save_folder)
        elif (step is not None or naming.is_temporary(path.name)) and is_left_over(path):
            left_over.append(path)

    def remove(path: Path) -> None:
        if _is_removed(path):
            removed.append(path.name)

    if not remove_beside(left_over, remove, _LEFT_OVER_S):
        output.tell(
            f"[ttp] {save_folder}: what earlier jobs have left there is still being removed", to="stdout"
        )
    _remove_drafts(save_folder)
    return list(removed)


def is_left_over(path: Path) -> bool:
    """Return True if `path`, with the name of a folder of ours, is a folder; a file or a link is left."""
    return not path.is_symlink() and disk.is_folder(path)


def abandon(folder: Path) -> list[Path]:
    """Rename a temporary folder, if it exists; return the renamed folders, which are to be removed."""
    if not os.path.lexists(folder):
        return []
    if not is_left_over(folder):
        disk.remove(folder)  # a file or a link
        return []
    abandoned = disk.free_name(folder.parent, partial(naming.abandoned_name, folder.name))
    folder.rename(abandoned)
    return [abandoned]


def abandon_regular_saves(save_folder: Path, generation: str) -> list[Path]:
    """Rename the framework's own unfinished saves of the generation, which no process can complete any more.

    Nothing is removed here: the caller removes the folders that are returned (`remove_beside`).

    Under the lock, so that a process about to publish a save has published, or finds nothing.
    """
    folders: list[Path] = []
    for name in filter(lambda name: naming.is_regular(name, generation), tracker.entry_names(save_folder)):
        with contextlib.suppress(OSError, CheckpointError), _locked_on_a_full_disk(save_folder):
            folders += (abandoned := abandon(save_folder / name))
            if abandoned:
                step = naming.step_of(name.partition("_saving")[0])
                output.tell(
                    f"[ttp] the regular save of step {step} was incomplete when the incident began; "
                    "its files are removed",
                    to="stdout",
                )
    return folders


def remove_beside(folders: list[Path], remove: Callable[[Path], object], patience_s: float) -> bool:
    """Call `remove` for each of `folders` in a thread; wait at most `patience_s`; return True if it has
    ended.

    The next start removes the rest.
    """

    def remove_all() -> None:
        for folder in folders:
            with contextlib.suppress(OSError, RecursionError):
                remove(folder)

    if not folders:
        return True
    # Daemon: on a disk that hangs the thread does not delay the end.
    thread = threading.Thread(target=remove_all, name="ttp-remove", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread is available
        remove_all()
    else:
        thread.join(patience_s)
    return not thread.is_alive()


@contextlib.contextmanager
def _locked_on_a_full_disk(save_folder: Path) -> Iterator[None]:
    """Hold the lock, with a short patience for last words; without room for the lock file, go on without."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(save_folder, patience_s=1.0))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        yield


def _is_removed(path: Path) -> bool:
    """Remove a folder; a folder that cannot be removed is harmless."""
    try:
        disk.remove(path)
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or "its folders are nested too deep"
        output.tell(f"[ttp] {path}: was left by an earlier job and cannot be removed ({reason})", to="stdout")
        return False
    return True


def _remove_drafts(save_folder: Path) -> None:
    """Remove the drafts of a process that died with the lock; nothing while the lock is held."""
    if any(save_folder.glob(f"{naming.TRACKER}.*")) or any(save_folder.glob(f"{naming.LEASE}.*")):
        with contextlib.suppress(CheckpointError), locked(save_folder, patience_s=0):
            tracker.remove_drafts(save_folder)


def _is_left_by(name: str, term: int, generation: str) -> bool:
    return naming.term_of(name) == term and (naming.is_of(name, generation) or not naming.is_temporary(name))


@disk.one_line
def put_in_place(save_folder: Path, step: int, complete_folder: Path) -> Path:
    """Give `complete_folder` the final name of `step`, and return the new path of the former checkpoint.

    `complete_folder` is on disk below `reshape_name(step)`, under the final name. Raises CheckpointError.
    """
    final = save_folder / naming.final_name(step)
    with locked(save_folder):
        kept = _kept(save_folder, step)
        beside_path = complete_folder.with_name(f"{complete_folder.name}.{complete_folder.stat().st_ino}")
        complete_folder.rename(beside_path)
        if disk.exchange(beside_path, final):
            disk.sync(save_folder)
            disk.sync(beside_path.parent)
            beside_path.rename(kept)
        else:
            final.rename(kept)
            beside_path.rename(final)
        disk.sync(save_folder)
    return kept


def restore_reshaped(save_folder: Path) -> None:
    """Finish an exchange that a crash has interrupted.

    The former checkpoint is kept; the checkpoint that the tracker names gets its name back. Raises OSError,
    CheckpointError (another process holds the lock).
    """
    if not (_is_lost(save_folder) or any(_beside(save_folder))):
        return
    with locked(save_folder):
        step = tracker.tracked_step(save_folder)
        if step is not None and _is_lost(save_folder):
            newest = naming.before_reshape_name(step, max(_numbers(save_folder, step)))
            (save_folder / newest).rename(save_folder / naming.final_name(step))
        for step, beside_path, inode in _beside(save_folder):
            is_made = beside_path.stat().st_ino == inode
            beside_path.rename(
                beside_path.with_name(naming.final_name(step)) if is_made else _kept(save_folder, step)
            )
        disk.sync(save_folder)


def _is_lost(save_folder: Path) -> bool:
    """Return True if the checkpoint that the tracker names is missing, and a kept one exists."""
    step = tracker.tracked_step(save_folder)
    return (
        step is not None
        and not (save_folder / naming.final_name(step)).exists()
        and bool(_numbers(save_folder, step))
    )


def _beside(save_folder: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield interrupted exchanges: step, path, inode of the new checkpoint."""
    for staging in (
        save_folder / name for name in tracker.entry_names(save_folder) if naming.is_reshape(name)
    ):
        for exchanged_match in filter(None, map(_EXCHANGED.fullmatch, tracker.entry_names(staging))):
            step = naming.step_of(exchanged_match[1])
            if step is not None:
                yield step, staging / exchanged_match[0], int(exchanged_match[2])


def _kept(save_folder: Path, step: int) -> Path:
    """Return the next free name for a kept checkpoint."""
    return save_folder / naming.before_reshape_name(step, max(_numbers(save_folder, step), default=0) + 1)


def _numbers(save_folder: Path, step: int) -> list[int]:
    """Return the numbers of the kept checkpoints of `step`."""
    numbered = filter(None, map(naming.before_reshape, tracker.entry_names(save_folder)))
    return [number for of, number in numbered if of == step]
