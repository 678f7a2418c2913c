"""From a temporary folder to a checkpoint that a framework finds, in an order in which a crash at any point
does no harm.

The promises: a folder `iter_N` is complete and on disk, or it is not there; the tracker file is replaced
atomically, last, and never goes backwards but from what is damaged; an older checkpoint is not touched. Every
function may be called again after a crash. One process at a time works on a root: the agent that the
controller runs in, or the rank that saves for the framework. Two controllers may be at work, one on each
side of a cut network: each writes to folders of its own, and they take turns at final names and the tracker.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from adaptor.checkpoint import dcp, disk, manifest, naming
from adaptor.checkpoint.manifest import FileEntry, Manifest
from adaptor.checkpoint.turn import remove_abandoned, turn
from adaptor.errors import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@disk.one_line
def prepare(root: Path, step: int, term: int = 0, number: int = 0, generation: str = "") -> Path:
    """Makes an empty temporary folder for the last words of `step` and returns it; a stale one is removed.

    `term` is that of the controller, `number` that of the folder; nobody else may be at work in it.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / naming.temporary_name(step, term, number, generation)
    disk.remove(folder)
    folder.mkdir()
    return folder


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
    for name in names[number if written is None else written : number]:
        _take(root / name, temporary, files)
    if not _is_of_this_run(root, step, generation):
        entries = dcp.join(temporary, files)
        if not entries:
            raise CheckpointError(f"{temporary}: nothing was written, so there is nothing to publish")
        _name(temporary, entries, progress)
        _drop_others(temporary, {entry.path for entry in entries})
        described = Manifest.now(step, entries, groups, world_size, generation)
        disk.write(temporary / naming.MANIFEST, described.encode())
        disk.sync_folders(temporary)
    with turn(_draft(root)):
        ours = not _is_of_this_run(root, step, generation)
        if ours:
            _move_in(root, step, temporary, final)
        _announce(root, step, generation)
    if not ours:
        disk.remove(temporary)
    return ours


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
    """Whether a complete checkpoint of `step` is there that the same generation of workers has made."""
    return _generation_of(root / naming.final_name(step)) == generation and is_complete(root, step)


@disk.one_line
def find(root: Path, step: int, generation: str) -> int:
    """Lets the tracker name the newest complete checkpoint, of `step` or later, that `generation` has made.

    Last words of an earlier step do as well: nobody trains after them, and there was no later step that the
    survivors could give. After a regular save of one there may have been.

    Returns its step; raises CheckpointError when there is none. Whoever made it may have died before it could
    replace the tracker, or tell.
    """
    steps = (naming.step_of(path.name) for path in root.iterdir())
    for found in sorted((s for s in steps if s is not None), reverse=True):
        if (found >= step or _are_last_words(root, found)) and _is_of_this_run(root, found, generation):
            with turn(_draft(root)):
                _announce(root, found, generation)
            return found
    raise CheckpointError(f"{root}: there is no checkpoint of step {step}, or a later one, of this run")


def _announce(root: Path, step: int, generation: str) -> None:
    """Lets the tracker name `step`; a later one of another run stays there, and a restart would follow it."""
    named = tracked_step(root)
    if named is not None and named > step and not _is_of_this_run(root, named, generation):
        raise CheckpointError(
            f"{root}: the tracker names step {named}, so step {step} would not be resumed from"
        )
    _advance_tracker(root, step)


@disk.one_line
def sync_regular(root: Path, step: int, generation: str = "") -> None:
    """Brings a regular save to disk, which may take long, so that `publish_regular` does not."""
    for path in disk.files(root / naming.regular_name(step, generation)):
        disk.sync(path)


@disk.one_line
def publish_regular(root: Path, step: int, generation: str = "") -> None:
    """Gives a regular save, which the framework wrote to `regular_name(step, generation)`, its final name.

    The tracker is left to the framework. A complete checkpoint of the same step is replaced by the newer one,
    without a moment in which neither bears the name where the filesystem can exchange two names. Raises
    CheckpointError.
    """
    saving, final = root / naming.regular_name(step, generation), root / naming.final_name(step)
    if not saving.is_dir():
        if is_complete(root, step):
            return
        raise CheckpointError(f"{saving}: missing, so the save of step {step} cannot be completed")
    entries = []
    for path in disk.files(saving):
        disk.sync(path)
        entries.append(FileEntry(path.relative_to(saving).as_posix(), path.stat().st_size, None))
    disk.write(saving / naming.MANIFEST, Manifest.now(step, entries, {}, 0, generation).encode())
    disk.sync_folders(saving)
    with turn(_draft(root)):
        _replace_regular(root, step, saving, final)


def _replace_regular(root: Path, step: int, saving: Path, final: Path) -> None:
    if not is_complete(root, step):
        _move_in(root, step, saving, final)
        return
    if not _exchange(saving, final):
        # A crash between these two is undone by clean().
        replaced = root / naming.replaced_name(step)
        disk.remove(replaced)
        final.rename(replaced)
        saving.rename(final)
        disk.sync(root)
        disk.remove(replaced)
        return
    disk.sync(root)
    disk.remove(saving)


@disk.one_line
def clean(root: Path, term: int | None = None, generation: str = "") -> list[str]:
    """Removes what dead processes left behind and returns the names; only call it while no worker lives.

    At the end of an incident workers on the other side of a cut network may live, and the disk may hang until
    those of a later generation do: only what was made for the controller of `term` in this `generation` is
    removed then; regular saves count as made for the first one, with rank 0.
    """
    removed = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if term is not None and not _is_left_by(path.name, term, generation):
            continue
        step = naming.step_of_replaced(path.name)
        if step is not None and not (root / naming.final_name(step)).exists():
            path.rename(root / naming.final_name(step))
            disk.sync(root)
        elif step is not None or naming.is_temporary(path.name):
            disk.remove(path)
            removed.append(path.name)
    remove_abandoned(_draft(root))
    for draft in root.glob(f"{naming.TRACKER}.*.saving") if not term else ():
        draft.unlink(missing_ok=True)
    return removed


def _is_left_by(name: str, term: int, generation: str) -> bool:
    return naming.term_of(name) == term and (naming.is_of(name, generation) or not naming.is_temporary(name))


def is_complete(root: Path, step: int) -> bool:
    """Whether `iter_N` is a checkpoint that can be loaded.

    It is when its manifest agrees with its files, or when the framework itself has gone on to name it, or a
    later one, in the tracker. Checksums are not computed again: a manifest goes under a final name only after
    every file was on disk.
    """
    folder = root / naming.final_name(step)
    if not folder.is_dir():
        return False
    if not manifest.verify(folder, checksums=False):
        return True
    named = tracked_step(root)
    return named is not None and named >= step


def _generation_of(folder: Path) -> str:
    """Which generation of workers has made a checkpoint; empty where the framework alone made it."""
    try:
        return manifest.read(folder).generation
    except CheckpointError:
        return ""


def _are_last_words(root: Path, step: int) -> bool:
    """Whether the checkpoint of `step` tells who gave it; of a regular save nobody is asked to."""
    try:
        return bool(manifest.read(root / naming.final_name(step)).groups)
    except CheckpointError:
        return False


def tracked_step(root: Path) -> int | None:
    """The step that the tracker names; None when it is missing, empty or damaged, or says `release`."""
    try:
        text = (root / naming.TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isascii() and text.isdigit() else None


@disk.one_line
def replace_tracker(root: Path, step: int) -> bool:
    """Lets the tracker name `step`, unless it names a later one; returns whether it was changed.

    `release` (a converted model to start from) counts as older than any step: the framework replaces it as
    well.
    """
    with turn(_draft(root)):
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
    with turn(_draft(root)):
        _set_tracker(root, step)


def _set_tracker(root: Path, step: int) -> None:
    """In a turn of this process."""
    disk.write(_draft(root), str(step).encode())
    _draft(root).replace(root / naming.TRACKER)
    disk.sync(root)


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
    """A name that nothing bears yet, for what lies under the final name of `step` and is to be kept."""
    number = 1
    while os.path.lexists(aside := root / naming.aside_name(step, number)):
        number += 1
    return aside


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


def _draft(root: Path) -> Path:
    return root / f"{naming.TRACKER}.tmp"
