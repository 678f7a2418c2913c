"""Removes uploads of large files that nobody will go on with: their parts cost as much as objects do.

They are found by the notes in the save folder (`upload_journal.py`), after each checkpoint that is committed;
and by the store's own list of uploads, when old checkpoints are pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from adaptor.checkpoint import manifest
from adaptor.errors import CheckpointError, StoreError
from adaptor.protocol import naming
from adaptor.store import layout, upload_journal
from adaptor.store.client import Store
from adaptor.store.upload_journal import Begun


def remove_noted(store: Store, root: Path, step: int, tell: Callable[[str], None]) -> None:
    """Remove the uploads that are noted in a save folder and that no checkpoint needs any more.

    That is those of `step`, which is complete in the store, and of steps before it, and those of a checkpoint
    that the save folder does not have any more.

    Args:
        root: the save folder.
        step: of the checkpoint.
        tell: says that one cannot be removed.
    """
    if store.multipart is None:
        return
    for noted in upload_journal.all_of(root, store.identity):
        if _is_needed(root, noted.begun, step):
            continue
        try:
            store.multipart.abort(noted.upload)
        except StoreError as error:
            tell(
                f"the parts of an upload that was cut short stay in the store until the next attempt: {error}"
            )
            return
        noted.forget()


def _is_needed(root: Path, begun: Begun, complete: int) -> bool:
    step = _step(begun.name)
    if step is None or step <= complete:
        return False
    try:
        return layout.place(manifest.read(root / naming.final_name(step))) == begun.seen
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
        found = [one for one in store.multipart.begun() if (of := _step(one.name)) is not None and of < step]
        for one in found:
            if not dry_run:
                store.multipart.abort(one)
    except StoreError as error:
        return 0, (
            f"uploads that were cut short may have left parts in the store, which cost money: {error};"
            " a rule of the bucket for incomplete multipart uploads removes them"
        )
    return len(found), ""


def _step(name: str) -> int | None:
    return naming.step_of(name.partition("/")[0])
