"""Removes old checkpoints from a store, and what uploads that were cut short have left of their steps.

That is objects without a manifest, and parts of objects that were not completed, which no listing of objects
shows and which cost as much as objects (`abandoned.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from adaptor.errors import StoreError
from adaptor.protocol import naming
from adaptor.store import abandoned, catalog, layout
from adaptor.store.client import Store


@dataclass(frozen=True)
class Pruned:
    """The result of a prune: the steps that it has removed, or would, in order, and their bytes.

    Attributes:
        later: steps after the newest that counts
        uploads: how many that were not completed it has removed besides, or would
        unlisted: why that is not known, in one line; empty where it is
    """

    kept: list[int]
    removed: list[int]
    bytes: int
    later: list[int]
    uploads: int = 0
    unlisted: str = ""


def prune(store: Store, keep: int, *, dry_run: bool = False, newest: int | None = None) -> Pruned:
    """Remove all objects of steps before the `keep` newest complete checkpoints.

    Damaged and unfinished ones of later steps stay: somebody may be at work on them. Where there are fewer
    complete ones, nothing is removed.

    Args:
        keep: how many steps with a complete checkpoint stay, from 1 on.
        dry_run: nothing is removed.
        newest: later steps neither count nor are removed.

    Raises:
        StoreError: the store refuses, or does not answer.
    """
    if keep < 1:
        raise StoreError(f"--keep is {keep}: it must be a number from 1 on")
    kept: list[int] = []
    steps = catalog.steps(store)
    newer_steps = [step for step in steps if newest is not None and step > newest]
    for checkpoint in catalog.newest_first(store, None, []):
        if checkpoint.known.step not in (*kept, *newer_steps):
            kept.append(checkpoint.known.step)
        if len(kept) == keep:
            break
    old = [step for step in steps if len(kept) == keep and step < kept[-1]]
    size = sum(_remove(store, step, dry_run) for step in old)
    uploads, unlisted = 0, ""
    if len(kept) == keep:
        uploads, unlisted = abandoned.remove_before(store, kept[-1], dry_run=dry_run)
    return Pruned(sorted(kept), old, size, newer_steps, uploads, unlisted)


def _remove(store: Store, step: int, dry_run: bool) -> int:
    """Remove the objects of a step; return their bytes."""
    complete, incomplete = catalog.places(store, step)
    total = 0
    for prefix in (*complete, *incomplete):
        stored_objects = store.objects(prefix)
        total += sum(stored.bytes for stored in stored_objects.values())
        if not dry_run:
            # First what makes it a checkpoint: from then on nobody takes it for one.
            store.delete([name for name in stored_objects if name == layout.manifest_name(prefix)])
            store.delete([name for name in stored_objects if name != layout.manifest_name(prefix)])
    return total + abandoned.remove_drafts(store, naming.final_name(step), dry_run=dry_run)
