"""Brings a checkpoint from a store into a save folder, hashed while it comes, and publishes it there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

from adaptor.checkpoint import disk, manifest, publish, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.save_folder_lock import locked
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.protocol.file_entry import FileEntry
from adaptor.store import catalog, completeness, files_for_node, prefetch
from adaptor.store.catalog import Checkpoint
from adaptor.store.client import PIECE, DamagedError, Store
from adaptor.store.files_for_node import NodeRanks

# What is called with the bytes that have come, and with all of them.
Progress = Callable[[int, int], None]


@dataclass
class Pulled:
    """The result of a pull.

    Attributes:
        there: whether the checkpoint was in the folder already
        whole: whether all files were pulled, not only those that the ranks of this node load
        untracked: a later step that folder and store have, where the tracker names the step that is loaded
        problems: of newer checkpoints, which are damaged: a line for each
    """

    step: int
    where: str
    bytes: int
    there: bool
    problems: list[str] = field(default_factory=list)
    whole: bool = True
    untracked: int | None = None


def pull(store: Store, root: Path, step: int | None = None, progress: Progress | None = None) -> Pulled:
    """Bring the newest checkpoint that is intact, and let the tracker name it.

    Args:
        root: the save folder; it is made if it is missing.
        step: of this one alone.

    Raises:
        StoreError: there is none, the folder has a later step, or the store does not answer.
        CheckpointError: the disk refuses, or is too small.
    """
    return _pulled(store, root, step, _pull_after(store, root, step, None, progress))


def _pulled(store: Store, root: Path, step: int | None, pulled: Pulled | None) -> Pulled:
    if pulled is None:
        of_step = "" if step is None else f" of step {step}"
        raise StoreError(f"{store}: there is no complete checkpoint{of_step} in it")
    return pulled


def resume(store: Store, root: Path, step: int | None = None, node: NodeRanks | None = None) -> Pulled | None:
    """Bring what a job is to go on from, unless the save folder has it, or a later step.

    Args:
        root: the save folder; it is made if it is missing.
        step: of this one alone.
        node: has the folder on a disk of its own: only what its ranks load is brought, where that is known.

    Returns:
        What was done; None where neither the folder nor the store has a checkpoint.

    Raises:
        StoreError: the store does not answer, all that it has is damaged, or there is no such step.
        CheckpointError: the disk refuses, or is too small.
    """
    local = _held(root) if step is None else step
    if local is not None and not tracker.is_complete(root, local):
        local = None
    if step is not None:
        is_present = local is not None and not _is_damaged(root, step)
        if is_present and not (is_part(root, step) and catalog.places(store, step)[0]):
            return Pulled(step, "", 0, True)
        return _pulled(store, root, step, _pull_after(store, root, step, None, None, node))
    return _pull_after(store, root, None, local, None)


def _pull_after(
    store: Store,
    root: Path,
    step: int | None,
    local: int | None,
    progress: Progress | None,
    node: NodeRanks | None = None,
) -> Pulled | None:
    """Pull the newest checkpoint that is intact, of a step after `local`, which the folder has."""
    problems: list[str] = []
    named = tracker.tracked_step(root)
    for checkpoint in catalog.newest_first(store, step, problems):
        saved_manifest = checkpoint.known
        damaged = _is_damaged(root, saved_manifest.step)
        stays = not damaged and not _completes(root, checkpoint)
        if local is not None and (saved_manifest.step < local or (saved_manifest.step == local and stays)):
            break
        _require_later(root, saved_manifest.step)
        try:
            wanted_checkpoint = _for_node(store, checkpoint, node)
        except DamagedError as error:
            problems.append(str(error))
            continue
        damaged = damaged or not _has(root, wanted_checkpoint)
        is_present = not damaged and tracker.is_of_generation(
            root, saved_manifest.step, saved_manifest.generation
        )
        if is_present and local is not None:  # the user has gone back by hand, as far as one can tell
            return Pulled(local, "", 0, True, problems, untracked=saved_manifest.step)
        if is_present:
            _set_back(root, saved_manifest.step)
            tracker.advance(root, saved_manifest.step)  # whoever has brought it may have died before
        else:
            try:
                _bring(
                    store, wanted_checkpoint, root, progress or (lambda count, total: None), replaces=damaged
                )
            except DamagedError as error:
                problems.append(str(error))
                continue
        if named is not None and named > saved_manifest.step:
            problems.append(f"{root / naming.final_name(named)}: missing, though the tracker names it")
        return Pulled(
            saved_manifest.step,
            checkpoint.where,
            wanted_checkpoint.bytes,
            is_present,
            problems,
            wanted_checkpoint is checkpoint,
        )
    if local is not None:
        return Pulled(local, "", 0, True, problems)
    if problems:
        of_step = "" if step is None else f" of step {step}"
        raise StoreError("; ".join([f"{store}: there is no complete checkpoint{of_step} in it", *problems]))
    return None


def _for_node(store: Store, checkpoint: Checkpoint, node: NodeRanks | None) -> Checkpoint:
    """Return the checkpoint with those files alone that the ranks of a node load, where that can be known."""
    needed_paths = files_for_node.needed(store, checkpoint, node) if node is not None else None
    files = tuple(
        file for file in checkpoint.known.files if needed_paths is None or file.path in needed_paths
    )
    if len(files) == len(checkpoint.known.files):
        return checkpoint
    return Checkpoint(checkpoint.where, replace(checkpoint.known, files=files))


def is_part(root: Path, step: int) -> bool:
    """Return whether the folder has only what some ranks load, or have saved."""
    try:
        folder = root / naming.final_name(step)
        return completeness.is_part(folder, manifest.read(folder))
    except CheckpointError:
        return False  # the framework alone has made it, or nobody can tell


def _has(root: Path, checkpoint: Checkpoint) -> bool:
    """Return whether the folder's checkpoint of this step, if there is one, has these files as they are."""
    if not tracker.has_manifest(root, checkpoint.known.step):
        return True
    local_files = {
        file.path: file for file in manifest.read(root / naming.final_name(checkpoint.known.step)).files
    }
    return all(
        file.path in local_files and catalog.is_same(file, local_files[file.path])
        for file in checkpoint.known.files
    )


def _completes(root: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint of the store has what the folder has a part of."""
    step, generation = checkpoint.known.step, checkpoint.known.generation
    is_same = bool(generation) and tracker.is_of_generation(root, step, generation)
    return is_same and is_part(root, step) and not _has(root, checkpoint)


def _is_damaged(root: Path, step: int) -> bool:
    """Return whether files of the folder's checkpoint are missing or cut short: a job would not load it."""
    if not tracker.has_manifest(root, step):
        return False
    return bool(manifest.defects(root / naming.final_name(step), checksums=False, step=step))


def _move_aside(root: Path, step: int) -> None:
    with locked(root):
        (root / naming.final_name(step)).rename(publish.place_aside(root, step))


def _require_later(root: Path, step: int) -> None:
    newest_held = _held(root)
    if newest_held is not None and newest_held > step:
        raise StoreError(
            f"{root}: holds step {newest_held}, which is later than step {step} of the store; name another "
            "folder"
        )


def _held(root: Path) -> int | None:
    """Return the step that a job would load from the folder.

    That is the one of the tracker, or, where its folder is gone, the newest that is complete.
    """
    named = tracker.tracked_step(root)
    if named is None or not _is_gone(root, named):
        return named
    for step in reversed(tracker.steps(root)):
        if tracker.is_complete(root, step) and not _is_damaged(root, step):
            return step
    return None


@disk.one_line
def _is_gone(root: Path, step: int) -> bool:
    return naming.final_name(step) not in tracker.entry_names(root)


@disk.one_line
def _set_back(root: Path, step: int) -> None:
    """Let the tracker name `step` where the later one that it names is gone."""
    with locked(root):
        named = tracker.tracked_step(root)
        if named is not None and named > step and _is_gone(root, named):
            tracker.set_under_lock(root, step)


@disk.one_line
def _room(root: Path, needed_bytes: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < needed_bytes:
        raise StoreError(
            f"{root}: {free / 1e9:.3f} GB are free, the checkpoint has {needed_bytes / 1e9:.3f} GB: make "
            "room, or"
            " name another folder"
        )


def _bring(store: Store, checkpoint: Checkpoint, root: Path, progress: Progress, *, replaces: bool) -> None:
    """Bring a checkpoint; `replaces`: what has its name is moved aside, once all of it has come."""
    saved_manifest = checkpoint.known
    _room(root, checkpoint.bytes)
    folder = publish.prepare(root, saved_manifest.step, generation=saved_manifest.generation)
    try:
        _write(store, checkpoint, folder, progress)
        if replaces:
            _move_aside(root, saved_manifest.step)
        _set_back(root, saved_manifest.step)  # else it would not be resumed from, and is refused
        publish.publish(
            root,
            saved_manifest.step,
            saved_manifest.files,
            saved_manifest.groups,
            saved_manifest.world_size,
            saved_manifest.generation,
        )
    except BaseException:
        # A folder that was cut short is of no use: the next pull begins anew.
        shutil.rmtree(folder, ignore_errors=True)
        raise


@disk.one_line
def _write_file(folder: Path, file: FileEntry, pieces: Iterator[memoryview]) -> str | None:
    with HashingFile(folder / file.path, base_folder=folder) as out:
        for piece in pieces:
            out.write(piece)
    return out.entry(file.path).xxh3_128


def _write(store: Store, checkpoint: Checkpoint, folder: Path, progress: Progress) -> None:
    """Write the files; a few requests are ahead of the disk. Raises DamagedError for wrong content."""
    come = 0

    def counted(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        nonlocal come
        for piece in pieces:
            come += len(piece)
            progress(come, checkpoint.bytes)
            yield piece

    # Closed after an error, when a request may still take minutes.
    with contextlib.closing(prefetch.in_order(_calls(store, checkpoint), "ttp-pull")) as coming:
        for file, pieces in _files(checkpoint, coming):
            digest = _write_file(folder, file, counted(pieces))
            if digest != file.xxh3_128:
                # A byte may have changed on its way: what is in the store decides.
                name = f"{checkpoint.where}/{file.path}"
                second_reading = catalog.ranges(store, name, file.bytes)
                come -= file.bytes
                if _write_file(folder, file, counted(second_reading)) != file.xxh3_128:
                    raise DamagedError(f"{store}/{name}: checksum differs from the manifest")


def _calls(store: Store, checkpoint: Checkpoint) -> Iterator[Callable[[], memoryview]]:
    for file in checkpoint.known.files:
        for start in range(0, file.bytes, PIECE):
            name = f"{checkpoint.where}/{file.path}"
            yield partial(store.get_range, name, start, min(PIECE, file.bytes - start))


def _files(
    checkpoint: Checkpoint, coming: Iterator[Future[memoryview]]
) -> Iterator[tuple[FileEntry, Iterator[memoryview]]]:
    """Yield each file with its pieces, which must be taken before the next file."""
    for file in checkpoint.known.files:
        count = len(range(0, file.bytes, PIECE))
        yield file, (piece.result() for piece in islice(coming, count))
