"""Removes what nobody will go on with of uploads that were cut short: it costs as much as objects do.

In a store with the interface of S3 that is parts of large files. They are found by the notes in the save
folder (`upload_journal.py`), after each checkpoint that is committed; and by the store's own list of uploads,
when old checkpoints are pruned. In a folder (file://) it is files: obstore writes each under another name
first, and no listing of objects has them.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

from adaptor.checkpoint import manifest
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.store import layout, upload_journal
from adaptor.store.client import Store
from adaptor.store.upload_journal import Begun

# What obstore writes before it is renamed to `name`: `name#1`, or the next number that is free.
_DRAFT = re.compile("[^#]*#[0-9]+")
# Nobody writes a draft any more that was left alone for so long.
_LEFT_S = 60.0


def remove_left_over(store: Store, root: Path, prefix: str, tell: Callable[[str], None]) -> None:
    """Remove what uploads that were cut short have left and that no checkpoint needs any more.

    In a folder that is what is below `prefix`. In a store with the interface of S3 it is the uploads that are
    noted in a save folder, if they are of this step, of a step before it, or of a checkpoint that the save
    folder does not have any more.

    Args:
        root: the save folder.
        prefix: the prefix of a checkpoint that is complete in the store.
        tell: says that something cannot be removed.
    """
    try:
        _remove_older_drafts(store, prefix)
        _remove_noted(store, root, prefix)
    except StoreError as error:
        tell(f"the parts of an upload that was cut short stay in the store until the next attempt: {error}")


def _remove_older_drafts(store: Store, prefix: str) -> None:
    """Remove what is below a checkpoint; a slow node may still write there what it has already."""
    if store.address.scheme == "file":
        committed = store.stat(layout.manifest_name(prefix))
        if committed is not None:  # by the clock of the file system
            remove_drafts(store, prefix, cutoff=committed.modified.timestamp() - _LEFT_S)


def _remove_noted(store: Store, root: Path, prefix: str) -> None:
    if store.multipart is None:
        return
    for noted in upload_journal.all_of(root, store.identity):
        if not _is_needed(root, noted.begun, prefix):
            store.multipart.abort(noted.upload)
            noted.forget()


def _is_needed(root: Path, begun_upload: Begun, prefix: str) -> bool:
    step, complete = _step(begun_upload.name), _step(prefix)
    if step is None or (complete is not None and step <= complete):
        return False
    try:
        return layout.place(manifest.read(root / naming.final_name(step))) == begun_upload.seen
    except manifest.UnreadableError:
        return True  # the disk may answer the next time
    except CheckpointError:
        return False


def remove_before(store: Store, step: int, *, dry_run: bool) -> tuple[int, str]:
    """Remove all uploads of steps before `step` that were not completed.

    Args:
        store: in which they are.
        step: and later ones stay.
        dry_run: nothing is removed.

    Returns:
        How many there were, and why that is not known, in one line; empty where it is.
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
    """Remove what uploads to a folder (file://) that were cut short have left, and folders that get empty.

    Args:
        store: in which it is; another one has none.
        prefix: below which it is.
        dry_run: nothing is removed.
        cutoff: what was written at this time, in seconds since 1970, or later stays.

    Returns:
        The bytes of what there was.

    Raises:
        StoreError: the folder does not let it be removed.
    """
    if store.address.scheme != "file":
        return 0
    total = 0
    try:
        for place, _, names in os.walk(Path(store.address.prefix) / prefix, topdown=False):
            for path in (Path(place, name) for name in names if _DRAFT.fullmatch(name)):
                with contextlib.suppress(FileNotFoundError):  # others remove it, too
                    status = path.lstat()
                    if status.st_mtime < cutoff:
                        total += status.st_size
                        if not dry_run:
                            path.unlink()
            if not dry_run:
                with contextlib.suppress(OSError):  # it has objects
                    Path(place).rmdir()
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be removed ({error.strerror})") from None
    return total


def _step(name: str) -> int | None:
    return naming.step_of(name.partition("/")[0])
