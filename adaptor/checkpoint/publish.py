"""Publishes checkpoints: renames the temporary folder and replaces the tracker, in an order in which a crash
at any point does no harm.

The promises: a folder `iter_N` is complete and on disk, or it is not there; the tracker file is replaced
atomically, last, and never goes backwards but from what is damaged; an older checkpoint is not touched. Every
function may be called again after a crash. One process at a time works on a root: the agent that the
controller has asked to publish, or the rank that saves for the framework. Two controllers may be at work,
one on each side of a cut network: each writes to folders of its own, and the lock is held for final names and
the tracker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from adaptor import output
from adaptor.checkpoint import dcp, disk, manifest
from adaptor.checkpoint.manifest import Manifest
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# In bytes: a step, and the spaces and line ends that somebody may have added.
_LONGEST_TRACKER = 256
# Seconds that a save waits until useless folders are removed and their room is free. Thousands of files on a
# slow disk take longer: a thread goes on removing them beside the save.
_ROOM_S = 2.0
# A start waits as long for what earlier jobs have left to be removed. All other ranks wait for it, some of
# them within time-outs of minutes; after this it goes on beside them.
_LEFT_OVER_S = 60.0
# Files that are no part of a save: what an NFS server keeps of a removed open file, and short-lived probes.
_PASSING = (".nfs", disk.PROBE)


@disk.one_line
def prepare(root: Path, step: int, term: int = 0, number: int = 0, generation: str = "") -> Path:
    """Makes an empty temporary folder for the last words of `step` and returns it; a stale one is removed.

    `term` is that of the controller, `number` that of the folder; nobody else may be at work in it. Nobody
    waits for a slow disk to remove what is large.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / naming.temporary_name(step, term, number, generation)
    abandoned = _abandon(folder)
    # Rank 0, which completes regular saves, is on the controller's side of the network, and frozen or dead.
    if term == number == 0:
        abandoned += _abandon_regular_saves(root, generation)
    disk.make_private(folder)
    _remove_beside(abandoned, disk.discard, _ROOM_S)
    return folder


def _abandon(folder: Path) -> list[Path]:
    """Take its name from a temporary folder, if it is there; return what is to be removed of it."""
    if not os.path.lexists(folder):
        return []
    if not is_left_over(folder):
        disk.remove(folder)  # a file or a link
        return []
    abandoned = _free_name(folder.parent, partial(naming.abandoned_name, folder.name))
    folder.rename(abandoned)
    return [abandoned]


def _abandon_regular_saves(root: Path, generation: str) -> list[Path]:
    """Take their names from the regular saves of this generation, which cannot be completed; return the new
    ones.

    Under the lock, so that whoever is about to publish one has done so or finds nothing.
    """
    found = []
    for name in filter(lambda name: naming.is_regular(name, generation), names(root)):
        with contextlib.suppress(OSError, CheckpointError), _locked_on_a_full_disk(root):
            found += _abandon(root / name)
    return found


def _remove_beside(folders: list[Path], remove: Callable[[Path], Any], patience_s: float) -> bool:
    """Remove folders in a thread that is waited for, but not for ever; return whether it has come to its end.

    What it does not come to is removed by the next start.
    """

    def remove_all() -> None:
        for folder in folders:
            with contextlib.suppress(OSError, RecursionError):
                remove(folder)

    if not folders:
        return True
    # Daemon: on a disk that hangs it keeps nobody from the end.
    thread = threading.Thread(target=remove_all, name="ttp-remove", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had
        remove_all()
    else:
        thread.join(patience_s)
    return not thread.is_alive()


@contextlib.contextmanager
def _locked_on_a_full_disk(root: Path) -> Iterator[None]:
    """The lock, for as long as last words can wait; without room for its file, nobody holds it."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(root, patience_s=1.0))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        yield


@disk.one_line
def publish(
    root: Path,
    step: int,
    files: Iterable[FileEntry],
    groups: Mapping[str, Any],
    world_size: int,
    generation: str = "",
    term: int = 0,
    number: int = 0,
    written: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> bool:
    """Turns the temporary folder of `step`, `term`, `number` into a checkpoint and lets the tracker name it.

    Call it once every group has reported its `files` (paths relative to the folder). `groups` is what the
    manifest keeps about who wrote which group. Where the folder was made as number `written`, it is taken
    from whoever may be at work in it. Returns False when a complete checkpoint of this step was there already
    that the same `generation` of workers has made: that one stays and ours is removed. One of another
    generation need not have come the same way: it is moved aside. Where the tracker names a later step of the
    same generation, another controller has saved it, and it stays. Raises CheckpointError when a file is
    missing or has another size, when parts do not make a whole, or when the disk refuses. There may be
    thousands of files: `progress` is called for each.
    """
    names = [naming.temporary_name(step, term, n, generation) for n in range(number + 1)]
    temporary, final = root / names[number], root / naming.final_name(step)
    files = tuple(files)
    _require_names(temporary, files)
    for name in names[number if written is None else written : number]:
        _take(root / name, temporary, files)
    if not _is_of_this_run(root, step, generation):
        entries = dcp.join(temporary, files)
        if not entries:
            raise CheckpointError(f"{temporary}: nothing was written, so there is nothing to publish")
        _name(temporary, entries, progress)
        _drop_others(temporary, {entry.path for entry in entries})
        described = Manifest.now(step, entries, groups, world_size, generation)
        disk.write(temporary, naming.MANIFEST, described.encode())
        disk.share(temporary)
        disk.sync_folders(temporary)
    with locked(root):
        ours = not _is_of_this_run(root, step, generation)
        if ours:
            _move_in(root, step, temporary, final)
        _tell_tracker(root, step, generation)
    if not ours:
        _remove_beside([temporary], disk.remove, _ROOM_S)
    return ours


def _require_names(folder: Path, files: Iterable[FileEntry]) -> None:
    """Refuse what was reported as written elsewhere than in `folder`. Raises CheckpointError."""
    try:
        manifest.require_inside(files)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _take(source: Path, target: Path, files: tuple[FileEntry, ...]) -> None:
    """Takes a folder, if it is there, from an agent that may be at work in it: stopped, cut off, or on a disk
    that hangs. By name it finds nothing any more; a file that it has open goes, and is written anew.
    """
    try:
        source.rename(target)
    except FileNotFoundError:
        return
    _drop_others(target, {dcp.METADATA, *(path for file in files for path in (file.draft, file.path))})


def _is_of_this_run(root: Path, step: int, generation: str) -> bool:
    """Return True if there is a complete checkpoint of `step` by this generation of workers."""
    return _generation_of(root / naming.final_name(step)) == generation and is_complete(root, step)


@disk.one_line
def find(root: Path, step: int, generation: str) -> int:
    """Lets the tracker name the newest complete checkpoint, of `step` or later, that `generation` has made.

    Last words of an earlier step do as well: nobody trains after them, and there was no later step that the
    survivors could give. After a regular save of one there may have been.

    Returns its step; raises CheckpointError when there is none. Whoever made it may have died before it could
    replace the tracker, or tell.
    """
    for found in reversed(steps(root)):
        if (found >= step or _are_last_words(root, found)) and _is_of_this_run(root, found, generation):
            with locked(root):
                _tell_tracker(root, found, generation)
            return found
    raise CheckpointError(f"{root}: there is no checkpoint of step {step}, or a later one, of this run")


def _tell_tracker(root: Path, step: int, generation: str) -> None:
    """Let the tracker name `step`, or a later step of this run.

    Raises:
        CheckpointError: the tracker names a later step of another run, which a restart would load.
    """
    named = tracked_step(root)
    if named is not None and named > step and not _is_of_this_run(root, named, generation):
        raise CheckpointError(
            f"{root}: the tracker names step {named}, so step {step} would not be resumed from"
        )
    _advance_tracker(root, step)


@disk.one_line
def prepare_regular(root: Path, step: int, generation: str = "") -> None:
    """Makes the folder that the framework writes a regular save to, on each rank.

    Raises CheckpointError where another user has put a link or a folder in its place.
    """
    saving = root / naming.regular_name(step, generation)
    root.mkdir(parents=True, exist_ok=True)
    disk.ensure_private(saving)


@disk.one_line
def sync_regular(root: Path, step: int, generation: str = "") -> None:
    """Brings a regular save to disk, which may take long, so that `publish_regular` does not."""
    for path in _written(root / naming.regular_name(step, generation)):
        disk.sync(path)


def _written(saving: Path) -> list[Path]:
    """The files of a regular save; the manifest is of an earlier call, which did not come to its end."""
    return [
        path
        for path in disk.files(saving)
        if path != saving / naming.MANIFEST and not path.name.startswith(_PASSING)
    ]


@disk.one_line
def publish_regular(root: Path, step: int, generation: str = "") -> None:
    """Give a regular save, which the framework wrote to `regular_name(step, generation)`, its final name.

    The tracker is not touched: the caller replaces it by `replace_tracker`. A complete checkpoint of the same
    step is replaced by the newer one, without a moment in which neither bears the name where the filesystem
    can exchange two names. Raises CheckpointError.
    """
    saving, final = root / naming.regular_name(step, generation), root / naming.final_name(step)
    if not saving.is_dir():
        if is_complete(root, step):
            return
        raise CheckpointError(f"{saving}: missing, so the save of step {step} cannot be completed")
    entries = []
    for path in _written(saving):
        disk.sync(path)
        entries.append(FileEntry(path.relative_to(saving).as_posix(), path.stat().st_size, None))
    if not entries:
        raise CheckpointError(f"{saving}: nothing was written, so there is nothing to publish")
    disk.write(saving, naming.MANIFEST, Manifest.now(step, entries, {}, 0, generation).encode())
    disk.share(saving)
    disk.sync_folders(saving)
    with locked(root):
        older = _replace_regular(root, step, saving, final)
    # The caller may keep a window open, in which this rank gives nothing to last words.
    _remove_beside(older, disk.remove, _ROOM_S)


def _replace_regular(root: Path, step: int, saving: Path, final: Path) -> list[Path]:
    """Under the lock: let `saving` become `final`; return where older versions of it are, to be removed."""
    if not is_complete(root, step):
        _move_in(root, step, saving, final)
        return []
    if not _exchange(saving, final):
        # A crash between these two is undone by clean().
        replaced = root / naming.replaced_name(step)
        older = []
        if is_left_over(replaced):
            older = [_free_name(root, partial(naming.abandoned_name, saving.name))]
            replaced.rename(older[0])
        else:
            disk.remove(replaced)
        final.rename(replaced)
        saving.rename(final)
        disk.sync(root)
        return [replaced, *older]
    disk.sync(root)
    return [saving]


@disk.one_line
def clean(root: Path, term: int | None = None, generation: str = "") -> list[str]:
    """Removes what dead processes left behind and returns the names; only call it while no worker lives.

    What is large is removed in a thread that outlives this call, where it takes long: a line says so.

    At the end of an incident workers on the other side of a cut network may live, and the disk may hang until
    those of a later generation do: only what was made for the controller of `term` in this `generation` is
    removed then; regular saves count as made for the first one, with rank 0.
    """
    left_over: list[Path] = []
    removed: list[str] = []
    for path in (root / name for name in names(root)):
        if term is not None and not _is_left_by(path.name, term, generation):
            continue
        step = naming.step_of_replaced(path.name)
        if step is not None and not (root / naming.final_name(step)).exists():
            path.rename(root / naming.final_name(step))
            disk.sync(root)
        elif (step is not None or naming.is_temporary(path.name)) and is_left_over(path):
            left_over.append(path)

    def remove(path: Path) -> None:
        if _is_removed(path):
            removed.append(path.name)

    if not _remove_beside(left_over, remove, _LEFT_OVER_S):
        output.tell(f"[ttp] {root}: what earlier jobs left over is still being removed", to="stdout")
    _remove_drafts(root)
    return list(removed)


def is_left_over(path: Path) -> bool:
    """Return whether what bears the name of a folder of ours is one; a file or a link is not, and is left."""
    return not path.is_symlink() and disk.is_folder(path)


def _is_removed(path: Path) -> bool:
    """Remove a folder; one that cannot be removed is in nobody's way."""
    try:
        disk.remove(path)
    except (OSError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "its folders are nested too deep"
        output.tell(f"[ttp] {path}: is left over, and cannot be removed ({why})", to="stdout")
        return False
    return True


def _remove_drafts(root: Path) -> None:
    """Remove what a process has left that died with the lock; nothing while somebody holds it."""
    if any(root.glob(f"{naming.TRACKER}.*")) or any(root.glob(f"{naming.LEASE}.*")):
        with contextlib.suppress(CheckpointError), locked(root, patience_s=0):
            _remove_drafts_under_the_lock(root)


def _remove_drafts_under_the_lock(root: Path) -> None:
    for name in (naming.TRACKER, naming.LEASE):
        for draft in root.glob(f"{name}.*{disk.DRAFT}"):
            disk.remove(draft)


def _is_left_by(name: str, term: int, generation: str) -> bool:
    return naming.term_of(name) == term and (naming.is_of(name, generation) or not naming.is_temporary(name))


def names(root: Path) -> list[str]:
    """Return what is in the save folder, in order; nothing where it is not there."""
    return sorted(path.name for path in root.iterdir()) if disk.is_folder(root) else []


def steps(root: Path) -> list[int]:
    """The steps that have a folder, in order."""
    return sorted(step for name in names(root) if (step := naming.step_of(name)) is not None)


def has_manifest(root: Path, step: int) -> bool:
    """Return whether the checkpoint of `step` was saved with the adaptor, intact or not."""
    return os.path.lexists(root / naming.final_name(step) / naming.MANIFEST)


def is_complete(root: Path, step: int) -> bool:
    """Return whether `iter_N` is a checkpoint that can be loaded.

    It is when its manifest agrees with its files, or when the framework itself has gone on to name it, or a
    later one, in the tracker. Checksums are not computed again: a manifest goes under a final name only after
    every file was on disk.
    """
    folder = root / naming.final_name(step)
    if not disk.is_folder(folder):
        return False
    if not manifest.verify(folder, checksums=False, step=step):
        return True
    named = tracked_step(root)
    return named is not None and named >= step


def _generation_of(folder: Path) -> str:
    """Return the generation of workers that made a checkpoint; empty if the framework alone made it."""
    try:
        return manifest.read(folder).generation
    except CheckpointError:
        return ""


def _are_last_words(root: Path, step: int) -> bool:
    """Return whether the checkpoint of `step` tells who gave it; of a regular save nobody is asked to."""
    try:
        return bool(manifest.read(root / naming.final_name(step)).groups)
    except CheckpointError:
        return False


def tracked_step(root: Path) -> int | None:
    """The step that the tracker names; None when it is missing, empty or damaged, or says `release`."""
    text = tracker_text(root)
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def tracker_text(root: Path) -> str:
    """Return the text of the tracker; empty if it is missing, unreadable, or longer than any tracker."""
    try:
        return disk.read(root / naming.TRACKER, _LONGEST_TRACKER).decode().strip()
    except (OSError, ValueError):
        return ""


@disk.one_line
def replace_tracker(root: Path, step: int) -> bool:
    """Lets the tracker name `step`, unless it names a later one; returns whether it was changed.

    `release` (a converted model to start from) counts as older than any step: the framework replaces it as
    well.
    """
    with locked(root):
        return _advance_tracker(root, step)


def _advance_tracker(root: Path, step: int) -> bool:
    named = tracked_step(root)
    if named is not None and named >= step:
        return False
    _set_tracker(root, step)
    return True


@disk.one_line
def go_back(root: Path, step: int, damaged: Mapping[int, Path]) -> None:
    """Moves the folders of damaged checkpoints, by step, aside, and lets the tracker name `step`.

    Here alone the tracker goes backwards: what it named is not there any more. It comes last, as ever. After
    a crash in between it names a folder that is gone, which the next start takes for one more damage.
    """
    for which, aside in damaged.items():
        (root / naming.final_name(which)).rename(aside)
    disk.sync(root)
    with locked(root):
        _set_tracker(root, step)


def _set_tracker(root: Path, step: int) -> None:
    """Under the lock."""
    _remove_drafts_under_the_lock(root)  # of a process that died with the lock
    tracker = root / naming.TRACKER
    if tracker.is_dir() and not tracker.is_symlink():  # no file can take its place
        tracker.rename(_free_name(root, lambda number: f"aside_{naming.TRACKER}.{number}"))
    disk.replace(root, naming.TRACKER, str(step).encode())


def _name(folder: Path, entries: tuple[FileEntry, ...], progress: Callable[[], None]) -> None:
    """Gives the files their names, unless an earlier call did before it crashed, and checks them."""
    for entry in entries:
        path = folder / entry.path
        with contextlib.suppress(FileNotFoundError):
            (folder / entry.draft).replace(path)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path}: reported as written, but missing") from error
        if size != entry.bytes:
            raise CheckpointError(f"{path}: {size} bytes, reported as {entry.bytes}")
        progress()


def _drop_others(folder: Path, keep: set[str]) -> None:
    for path in list(disk.files(folder)):
        if path.relative_to(folder).as_posix() not in keep:
            path.unlink()
    for place, _, _ in os.walk(folder, topdown=False):
        if not any(Path(place).iterdir()):
            Path(place).rmdir()


def _move_in(root: Path, step: int, source: Path, final: Path) -> None:
    """Renames `source` to `final`; what bears that name is moved aside."""
    if os.path.lexists(final):
        final.rename(place_aside(root, step))
    source.rename(final)
    disk.sync(root)


def place_aside(root: Path, step: int) -> Path:
    """Return a free name to which the folder with the final name of `step` can be moved."""
    return _free_name(root, partial(naming.aside_name, step))


def _free_name(root: Path, name: Callable[[int], str]) -> Path:
    """The first name, by number, that nothing bears yet."""
    return next(path for number in count(1) if not os.path.lexists(path := root / name(number)))


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system or its filesystem cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(one))
