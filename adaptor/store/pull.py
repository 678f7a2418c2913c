"""Chooses the newest intact checkpoint of a store, brings it into a save folder, and publishes it there.

A node whose ranks load a known part of the files pulls only this part. In the format `torch` a rank loads the
folder of its model-parallel rank, which the layout file names for the parallel sizes of the job that saved.
In the format `torch_dist` the framework divides the reading among ranks, so the part is not known.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import xxhash

from adaptor import threads
from adaptor.checkpoint import disk, layout_file, manifest, publish, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.checkpoint.tracker import locked
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.store import catalog, local_checkpoints
from adaptor.store.catalog import Checkpoint
from adaptor.store.client import PIECE, DamagedError, Store


@dataclass
class Pulled:
    """The result of a pull.

    Attributes:
        there: the checkpoint was in the folder already
        whole: all files were pulled, not only the files that the ranks of this node load
        untracked: a later step in folder and store, if the tracker names the loaded step
        problems: a line for each damaged newer checkpoint
    """

    step: int
    where: str
    bytes: int
    there: bool
    problems: list[str] = field(default_factory=list)
    whole: bool = True
    untracked: int | None = None


def pull(store: Store, root: Path, step: int | None = None) -> Pulled:
    """Bring the newest intact checkpoint, and let the tracker name it.

    Args:
        store: the store.
        root: the save folder; a missing folder is made.
        step: this step alone; None: any step.

    Raises:
        StoreError: the store has no checkpoint, the folder has a later step, or the store does not answer.
        CheckpointError: the disk refuses, or is too small.
    """
    return _pulled(store, root, step, _pull_after(store, root, step, None))


def _pulled(store: Store, root: Path, step: int | None, pulled: Pulled | None) -> Pulled:
    if pulled is None:
        of_step = "" if step is None else f" of step {step}"
        raise StoreError(f"{store}: there is no complete checkpoint{of_step} in it")
    return pulled


def resume(store: Store, root: Path, step: int | None = None, node: NodeRanks | None = None) -> Pulled | None:
    """Bring the checkpoint from which a job resumes, unless the save folder has it or a later step.

    Args:
        store: the store.
        root: the save folder; a missing folder is made.
        step: this step alone; None: any step.
        node: the ranks of a node with its own disk: only the files that they load are pulled, if known.

    Returns:
        The result; None if neither the folder nor the store has a checkpoint.

    Raises:
        StoreError: the store does not answer, has only damaged checkpoints, or lacks the step.
        CheckpointError: the disk refuses, or is too small.
    """
    local = _held(root) if step is None else step
    if local is not None and not tracker.is_complete(root, local):
        local = None
    if step is not None:
        is_present = local is not None and not _is_damaged(root, step)
        if is_present and not (is_part(root, step) and catalog.places(store, step)[0]):
            return Pulled(step, "", 0, True)
        return _pulled(store, root, step, _pull_after(store, root, step, None, node))
    return _pull_after(store, root, None, local)


def _pull_after(
    store: Store,
    root: Path,
    step: int | None,
    local: int | None,
    node: NodeRanks | None = None,
) -> Pulled | None:
    """Pull the newest intact checkpoint of a step after `local`, the step that the folder has."""
    problems: list[str] = []
    named = tracker.tracked_step(root)
    for checkpoint in catalog.newest_first(store, step, problems):
        saved_manifest = checkpoint.saved_manifest
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
        if is_present and local is not None:  # the user has probably gone back by hand
            return Pulled(local, "", 0, True, problems, untracked=saved_manifest.step)
        if is_present:
            _set_back(root, saved_manifest.step)
            tracker.advance(root, saved_manifest.step)  # the process that pulled it may have died before
        else:
            try:
                _bring(store, wanted_checkpoint, root, replaces=damaged)
            except DamagedError as error:
                problems.append(str(error))
                continue
        if named is not None and named > saved_manifest.step:
            problems.append(f"{root / naming.final_name(named)}: missing, though the tracker names it")
        return Pulled(
            saved_manifest.step,
            checkpoint.prefix,
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
    """Return the checkpoint with only the files that the ranks of a node load, if known."""
    needed_paths = needed(store, checkpoint, node) if node is not None else None
    files = tuple(
        file for file in checkpoint.saved_manifest.files if needed_paths is None or file.path in needed_paths
    )
    if len(files) == len(checkpoint.saved_manifest.files):
        return checkpoint
    return Checkpoint(checkpoint.prefix, replace(checkpoint.saved_manifest, files=files))


def is_part(root: Path, step: int) -> bool:
    """Return whether the folder has only the files that some ranks load, or have saved."""
    try:
        folder = root / naming.final_name(step)
        return local_checkpoints.is_part(folder, manifest.read(folder))
    except CheckpointError:
        return False  # made by the framework alone, or unknown


def _has(root: Path, checkpoint: Checkpoint) -> bool:
    """Return whether the folder's checkpoint of the step, if present, has the same files."""
    if not tracker.has_manifest(root, checkpoint.saved_manifest.step):
        return True
    local = manifest.read(root / naming.final_name(checkpoint.saved_manifest.step))
    return manifest.may_have(local.files, checkpoint.saved_manifest.files)


def _completes(root: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint of the store completes the part in the folder."""
    step, generation = checkpoint.saved_manifest.step, checkpoint.saved_manifest.generation
    is_same = bool(generation) and tracker.is_of_generation(root, step, generation)
    return is_same and is_part(root, step) and not _has(root, checkpoint)


def _is_damaged(root: Path, step: int) -> bool:
    """Return whether the folder's checkpoint lacks files or parts of files, so that no job would load it."""
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

    This is the step of the tracker or, if its folder is gone, the newest complete step.
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
    """Let the tracker name `step` if the folder of its later step is gone."""
    with locked(root):
        named = tracker.tracked_step(root)
        if named is not None and named > step and _is_gone(root, named):
            tracker.set_under_lock(root, step)


@disk.one_line
def _room(root: Path, needed_bytes: int) -> None:
    root.mkdir(parents=True, exist_ok=True)
    disk.require_room(root, needed_bytes, "the checkpoint has", error=StoreError)


def _bring(store: Store, checkpoint: Checkpoint, root: Path, *, replaces: bool) -> None:
    """Bring a checkpoint; `replaces`: the present folder of its name is moved aside after the pull."""
    saved_manifest = checkpoint.saved_manifest
    _room(root, checkpoint.bytes)
    folder = publish.prepare(root, saved_manifest.step, generation=saved_manifest.generation)
    try:
        _write(store, checkpoint, folder)
        if replaces:
            _move_aside(root, saved_manifest.step)
        _set_back(root, saved_manifest.step)  # else no job would resume from it
        publish.publish(
            root,
            saved_manifest.step,
            saved_manifest.files,
            saved_manifest.groups,
            saved_manifest.world_size,
            saved_manifest.generation,
            state=saved_manifest.state,
        )
    except BaseException:
        # A partial folder is of no use: the next pull begins again.
        shutil.rmtree(folder, ignore_errors=True)
        raise


@disk.one_line
def _write_file(folder: Path, file: FileEntry, pieces: Iterator[memoryview]) -> str | None:
    with HashingFile(folder / file.path, base_folder=folder) as out:
        for piece in pieces:
            out.write(piece)
    return out.entry(file.path).xxh3_128


def _write(store: Store, checkpoint: Checkpoint, folder: Path) -> None:
    """Write the files; a few requests run ahead of the disk. Raises DamagedError for wrong content."""
    # Closed after an error, when a request may still take minutes.
    with contextlib.closing(threads.in_order(_calls(store, checkpoint), "ttp-pull")) as coming:
        for file, pieces in _files(checkpoint, coming):
            digest = _write_file(folder, file, pieces)
            if digest != file.xxh3_128:
                # A byte may have changed on its way: a second reading decides.
                name = f"{checkpoint.prefix}/{file.path}"
                second_reading = catalog.ranges(store, name, file.bytes)
                if _write_file(folder, file, second_reading) != file.xxh3_128:
                    raise DamagedError(f"{store}/{name}: checksum differs from the manifest")


def _calls(store: Store, checkpoint: Checkpoint) -> Iterator[Callable[[], memoryview]]:
    for file in checkpoint.saved_manifest.files:
        for start in range(0, file.bytes, PIECE):
            name = f"{checkpoint.prefix}/{file.path}"
            yield partial(store.get_range, name, start, min(PIECE, file.bytes - start))


def _files(
    checkpoint: Checkpoint, coming: Iterator[Future[memoryview]]
) -> Iterator[tuple[FileEntry, Iterator[memoryview]]]:
    """Yield each file with its pieces, which must be read before the next file."""
    for file in checkpoint.saved_manifest.files:
        count = len(range(0, file.bytes, PIECE))
        yield file, (piece.result() for piece in islice(coming, count))


_MODEL_PARALLEL = "mp_rank_"


class NodeRanks(msgspec.Struct, frozen=True):
    """The ranks of a node, and the sizes of the job.

    Attributes:
        ranks: of this node
        world_size: the number of ranks of the job
        tp, pp: its tensor and pipeline parallel sizes
    """

    ranks: tuple[int, ...]
    world_size: int
    tp: int
    pp: int


def needed(store: Store, checkpoint: Checkpoint, node: NodeRanks) -> set[str] | None:
    """Return the files that the ranks of a node load, None if unknown.

    Args:
        store: the store of the checkpoint.
        checkpoint: the checkpoint.
        node: the ranks, numbered as the framework does by default.

    Raises:
        DamagedError: the layout file differs from the manifest.
    """
    files = {file.path: file for file in checkpoint.saved_manifest.files}
    folders = {path.partition("/")[0] for path in files if path.startswith(_MODEL_PARALLEL)}
    if naming.LAYOUT not in files or not folders:
        return None
    name = f"{checkpoint.prefix}/{naming.LAYOUT}"
    content = store.get(name, layout_file.LARGEST)
    if xxhash.xxh3_128_hexdigest(content) != files[naming.LAYOUT].xxh3_128:
        raise DamagedError(f"{store}/{name}: checksum differs from the manifest")
    try:
        places = layout_file.places(content, f"{store}/{name}")
    except CheckpointError:
        return None
    names = {(place.tp, place.pp): place.folder for place in places}
    stages, remainder = node.pp, node.world_size % (node.tp * node.pp)
    alike = all(
        (place_of_rank.sizes.get("tp"), place_of_rank.sizes.get("pp")) == (node.tp, node.pp)
        for place_of_rank in places
    )
    # Experts are numbered across the ranks of data.
    if remainder or not alike or any(place_of_rank.sizes.get("ep", 1) > 1 for place_of_rank in places):
        return None
    own_folders = {names.get((rank % node.tp, rank // (node.world_size // stages))) for rank in node.ranks}
    if not own_folders <= folders:
        return None
    return {path for path in files if path.partition("/")[0] not in folders - own_folders}
