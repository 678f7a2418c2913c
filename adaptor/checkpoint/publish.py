"""Publishes last words: renames the temporary folder, then replaces the tracker. A crash does no harm.

The promises, for regular saves as well (`regular_folder`): a folder `iter_N` is complete and on disk, or does
not exist; the tracker file is replaced atomically, last, and never goes backwards but from a damaged
checkpoint; an older checkpoint is not touched. Every function may be called again after a crash.

One process at a time works on a save folder: the agent that the controller has asked to publish, or the rank
that saves for the framework. Two controllers may be at work, one on each side of a cut network: each writes
to folders of its own, and final names and the tracker are changed under the lock.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from adaptor.checkpoint import dcp, disk, left_overs, manifest, tracker
from adaptor.checkpoint.manifest import Manifest
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.verification import agreed_state
from adaptor.verification.agreed_state import AgreedState

# Of a further tracker of a framework (`FileEntry.tracker`), which is read whole; in bytes.
_LONGEST_TRACKER = 1 << 20


@disk.one_line
def prepare(
    save_folder: Path, step: int, term: int = 0, number: int = 0, generation: str = "", *, first: bool = False
) -> Path:
    """Make an empty temporary folder for the last words of `step`, and return the folder.

    Useless folders are removed, so that their room is free: a stale folder of the same name and, for the
    `first` order of the incident under the controller of node 0, the framework's own unfinished saves. No
    call waits for a slow disk. No other process may be at work in folder `number` of `term`. Raises
    CheckpointError.
    """
    save_folder.mkdir(parents=True, exist_ok=True)
    folder = save_folder / naming.temporary_name(step, term, number, generation)
    abandoned = left_overs.abandon(folder)
    # Rank 0, which completes regular saves, is on the controller's side of the network, and frozen or dead;
    # after an online recovery rank 0 makes the save again.
    if first:
        abandoned += left_overs.abandon_regular_saves(save_folder, generation)
    disk.make_private(folder)
    left_overs.remove_beside(abandoned, disk.discard, left_overs.REMOVAL_WAIT_S)
    return folder


def get_ready() -> None:
    """Import the modules of torch for the join of parts, before parts exist."""
    with contextlib.suppress(Exception):  # `publish` reports the error
        dcp.import_torch()


@disk.one_line
def publish(
    save_folder: Path,
    step: int,
    files: Iterable[FileEntry],
    groups: Mapping[str, object],
    world_size: int,
    generation: str = "",
    term: int = 0,
    number: int = 0,
    written: int | None = None,
    progress: Callable[[], None] = lambda: None,
    state: AgreedState | None = None,
) -> bool:
    """Turn the temporary folder of `step`, `term`, `number` into a checkpoint; the tracker then names the
    step.

    Called once every group has reported its files. A complete checkpoint of the step by the same `generation`
    of workers stays, and the temporary folder is removed; False is returned then. A checkpoint of another
    generation may differ, and is moved aside. If the tracker names a later step of the same generation,
    another controller has saved the later step, and the tracker stays.

    `groups`: the writers, for the manifest. `written`: the number of the order that made the folder, if
    different; the folder is taken from a former agent, perhaps still at work. `progress` is called for each
    file. `state`: of the manifest, if the files have no parts of it. Raises CheckpointError.
    """
    names = [naming.temporary_name(step, term, n, generation) for n in range(number + 1)]
    temporary, final = save_folder / names[number], save_folder / naming.final_name(step)
    files = tuple(files)
    _require_names(temporary, files)
    for name in names[number if written is None else written : number]:
        _take(save_folder / name, temporary, files)
    if not tracker.is_of_generation(save_folder, step, generation):
        joined = dcp.join(temporary, files)
        entries, agreed = agreed_state.join(temporary, step, joined)
        if not entries:
            raise CheckpointError(f"{temporary}: nothing was written, so there is nothing to publish")
        _name(temporary, entries, progress)
        _drop_others(temporary, {entry.path for entry in entries})
        described = Manifest.now(step, entries, groups, world_size, generation, state=agreed or state)
        disk.write(temporary, naming.MANIFEST, described.encode())
        disk.share_folder(temporary)
        disk.sync_folders(temporary)
    with locked(save_folder):
        is_foreign = not tracker.is_of_generation(save_folder, step, generation)
        if is_foreign:
            move_in(save_folder, step, temporary, final)
        _tell_tracker(save_folder, step, generation)
    if not is_foreign:
        left_overs.remove_beside([temporary], disk.remove, left_overs.REMOVAL_WAIT_S)
    return is_foreign


@disk.one_line
def find(save_folder: Path, step: int, generation: str) -> int:
    """Let the tracker name the newest complete checkpoint, of `step` or later, by `generation`; return its
    step.

    Last words of an earlier step count as well: no rank trains afterwards, and the survivors had no later
    step. After a regular save of an earlier step a later step may exist. The process that made the checkpoint
    may have died before the tracker was replaced, or before its report. Raises CheckpointError if there is
    none.
    """
    for saved_step in reversed(tracker.steps(save_folder)):
        candidate = saved_step >= step or tracker.are_last_words(save_folder, saved_step)
        if candidate and tracker.is_of_generation(save_folder, saved_step, generation):
            with locked(save_folder):
                _tell_tracker(save_folder, saved_step, generation)
            return saved_step
    raise CheckpointError(
        f"{save_folder}: there is no checkpoint of step {step}, or a later one, of this run"
    )


def _require_names(folder: Path, files: Iterable[FileEntry]) -> None:
    """Refuse files that were reported as written outside of `folder`. Raises CheckpointError."""
    try:
        manifest.require_inside(files)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _take(source: Path, target: Path, files: tuple[FileEntry, ...]) -> None:
    """Take a folder, if it exists, from an agent that may still be at work in it.

    By name the agent finds nothing any more; a file that the agent has open is removed, and written anew.
    """
    try:
        source.rename(target)
    except FileNotFoundError:
        return
    own_paths = {path for file in files for path in (file.draft, file.path)}
    _drop_others(target, {dcp.METADATA, dcp.INTEGRITY, *own_paths})


def _tell_tracker(save_folder: Path, step: int, generation: str) -> None:
    """Let the tracker name `step`, or a later step of this run.

    Raises CheckpointError if it names a later step of another run, which a restart would load.
    """
    named = tracker.tracked_step(save_folder)
    if named is not None and named > step and not tracker.is_of_generation(save_folder, named, generation):
        raise CheckpointError(
            f"{save_folder}: the tracker names step {named}, so step {step} would not be resumed from"
        )
    if named is None or named < step:
        _copy_trackers(save_folder, step)
    tracker.advance_under_lock(save_folder, step)


def _copy_trackers(save_folder: Path, step: int) -> None:
    """Replace the further trackers of a framework by those files of the checkpoint of `step` that it reads in
    their place."""
    checkpoint = save_folder / naming.final_name(step)
    for entry in manifest.read(checkpoint).files:
        if entry.tracker is not None:
            tracker.remove_drafts(save_folder, (entry.tracker,))
            disk.replace(save_folder, entry.tracker, disk.read(checkpoint / entry.path, _LONGEST_TRACKER))


def _name(folder: Path, entries: tuple[FileEntry, ...], progress: Callable[[], None]) -> None:
    """Give the files their names, unless an earlier call did before a crash, and check the files."""
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
            path.unlink(missing_ok=True)  # an abandoned attempt may remove the file now, too
    for place, _, _ in os.walk(folder, topdown=False):
        if not any(Path(place).iterdir()):
            Path(place).rmdir()


def move_in(save_folder: Path, step: int, source: Path, final: Path) -> None:
    """Rename `source` to `final`, under the lock; a folder of the final name is moved aside."""
    if os.path.lexists(final):
        final.rename(place_aside(save_folder, step))
    source.rename(final)
    disk.sync(save_folder)


def place_aside(save_folder: Path, step: int) -> Path:
    """Return a free name to which the folder with the final name of `step` can be moved."""
    return disk.free_name(save_folder, partial(naming.aside_name, step))
