"""Removes old checkpoints from a store, and the remains of interrupted uploads.

Remains are objects without a manifest, and parts of uncompleted uploads, which no listing of objects shows
and which cost as much as objects. In a store with the interface of S3 the notes in the save folder
(`large_file.py`) name such uploads, after each committed checkpoint; the store's own list of uploads
names them when old checkpoints are pruned. In a folder (file://) the remains are files: obstore writes each
object under another name first, and no listing of objects shows the drafts.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import manifest
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.store import catalog, large_file
from adaptor.store.client import Store
from adaptor.store.large_file import Begun


@dataclass(frozen=True)
class Pruned:
    """The result of a prune.

    Attributes:
        kept: the kept steps
        removed: the removed steps, or the steps to remove, in order
        bytes: of the removed steps
        later: steps after the newest step that counts
        uploads: the number of removed uploads that were not completed
        unlisted: why the uploads are not known, in one line; empty if they are
    """

    kept: list[int]
    removed: list[int]
    bytes: int
    later: list[int]
    uploads: int = 0
    unlisted: str = ""


def prune(store: Store, keep: int, *, dry_run: bool = False, newest: int | None = None) -> Pruned:
    """Remove all objects of steps before the `keep` newest complete checkpoints.

    Damaged and unfinished checkpoints of later steps stay: a process may be writing them. If fewer than
    `keep` checkpoints are complete, nothing is removed.

    Args:
        store: the store.
        keep: the number of steps with a complete checkpoint that stay, from 1 on.
        dry_run: nothing is removed.
        newest: later steps neither count nor are removed.
    """
    if keep < 1:
        raise StoreError(f"--keep is {keep}: it must be a number from 1 on")
    kept: list[int] = []
    steps = catalog.steps(store)
    newer_steps = [step for step in steps if newest is not None and step > newest]
    for checkpoint in catalog.newest_first(store, None, []):
        if checkpoint.saved_manifest.step not in (*kept, *newer_steps):
            kept.append(checkpoint.saved_manifest.step)
        if len(kept) == keep:
            break
    old = [step for step in steps if len(kept) == keep and step < kept[-1]]
    size = sum(_remove(store, step, dry_run) for step in old)
    uploads, unlisted = 0, ""
    if len(kept) == keep:
        uploads, unlisted = remove_before(store, kept[-1], dry_run=dry_run)
    return Pruned(sorted(kept), old, size, newer_steps, uploads, unlisted)


def _remove(store: Store, step: int, dry_run: bool) -> int:
    """Remove the objects of a step; return their bytes."""
    complete, incomplete = catalog.places(store, step)
    total = 0
    for prefix in (*complete, *incomplete):
        stored_objects = store.objects(prefix)
        total += sum(stored.bytes for stored in stored_objects.values())
        if not dry_run:
            # The manifest first: without a manifest the objects are no checkpoint.
            store.delete([name for name in stored_objects if name == catalog.manifest_name(prefix)])
            store.delete([name for name in stored_objects if name != catalog.manifest_name(prefix)])
    return total + remove_drafts(store, naming.final_name(step), dry_run=dry_run)


# The draft of an object `name`: `name#1`, or the next free number.
_DRAFT = re.compile("[^#]*#[0-9]+")
# Seconds without a change after which a draft is abandoned.
_LEFT_S = 60.0


def remove_left_over(store: Store, root: Path, prefix: str, tell: Callable[[str], None]) -> None:
    """Remove the remains of interrupted uploads that no checkpoint needs any more.

    In a folder: the drafts below `prefix`. In a store with the interface of S3: the uploads noted in a save
    folder, of the step, of an earlier step, or of a checkpoint that is gone from the save folder.

    Args:
        store: the store.
        root: the save folder.
        prefix: of a complete checkpoint in the store.
        tell: prints a line about a failure.
    """
    try:
        _remove_older_drafts(store, prefix)
        _remove_noted(store, root, prefix)
    except StoreError as error:
        tell(f"the parts of an upload that was cut short stay in the store until the next attempt: {error}")


def _remove_older_drafts(store: Store, prefix: str) -> None:
    """Remove the old drafts below a checkpoint; a slow node may still write an object there."""
    if store.address.scheme == "file":
        committed = store.stat(catalog.manifest_name(prefix))
        if committed is not None:  # by the clock of the file system
            remove_drafts(store, prefix, cutoff=committed.modified.timestamp() - _LEFT_S)


def _remove_noted(store: Store, root: Path, prefix: str) -> None:
    if store.multipart is None:
        return
    for noted in large_file.all_of(root, store.identity):
        if not _is_needed(root, noted.begun, prefix):
            store.multipart.abort(noted.upload)
            noted.forget()


def _is_needed(root: Path, begun_upload: Begun, prefix: str) -> bool:
    step, complete = _step(begun_upload.name), _step(prefix)
    if step is None or (complete is not None and step <= complete):
        return False
    try:
        return catalog.place(manifest.read(root / naming.final_name(step))) == begun_upload.seen
    except manifest.UnreadableError:
        return True  # the disk may answer the next time
    except CheckpointError:
        return False


def remove_before(store: Store, step: int, *, dry_run: bool) -> tuple[int, str]:
    """Remove all uncompleted uploads of steps before `step`.

    Args:
        store: the store.
        step: uploads of this step and of later ones stay.
        dry_run: nothing is removed.

    Returns:
        The number of uploads, and in one line why it is not known; empty if it is.
    """
    if store.multipart is None:
        return 0, ""
    try:
        older_uploads = [
            upload
            for upload in store.multipart.begun()
            if (of := _step(upload.name)) is not None and of < step
        ]
        for upload in older_uploads:
            if not dry_run:
                store.multipart.abort(upload)
    except StoreError as error:
        return 0, (
            f"uploads that were cut short may have left parts in the store, which cost money: {error};"
            " a rule of the bucket for incomplete multipart uploads removes them"
        )
    return len(older_uploads), ""


def remove_drafts(store: Store, prefix: str, *, dry_run: bool = False, cutoff: float = math.inf) -> int:
    """Remove the drafts of interrupted uploads to a folder (file://), and empty folders.

    Args:
        store: the store; another kind of store has no drafts.
        prefix: of the drafts.
        dry_run: nothing is removed.
        cutoff: drafts written at this time, in seconds since 1970, or later stay.

    Returns:
        The bytes of the drafts.

    Raises:
        StoreError: the folder refuses the removal.
    """
    if store.address.scheme != "file":
        return 0
    total = 0
    try:
        for place, _, names in os.walk(Path(store.address.prefix) / prefix, topdown=False):
            for path in (Path(place, name) for name in names if _DRAFT.fullmatch(name)):
                with contextlib.suppress(FileNotFoundError):  # another process removed the draft
                    status = path.lstat()
                    if status.st_mtime < cutoff:
                        total += status.st_size
                        if not dry_run:
                            path.unlink()
            if not dry_run:
                with contextlib.suppress(OSError):  # the folder has objects
                    Path(place).rmdir()
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be removed ({error.strerror})") from None
    return total


def _step(name: str) -> int | None:
    return naming.step_of(name.partition("/")[0])
