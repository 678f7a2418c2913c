"""Removes old checkpoints from a store, and what uploads that were cut short have left of their steps."""

from __future__ import annotations

from dataclasses import dataclass

from adaptor.errors import StoreError
from adaptor.store import choose, layout
from adaptor.store.client import Store


@dataclass(frozen=True)
class Pruned:
    """The result of a prune: the steps that it has removed, or would, in order, and their bytes."""

    kept: list[int]
    removed: list[int]
    bytes: int


def prune(store: Store, keep: int, *, dry_run: bool = False) -> Pruned:
    """Remove all objects of steps before the `keep` newest complete checkpoints.

    Damaged and unfinished ones of later steps stay: somebody may be at work on them. Where there are fewer
    complete ones, nothing is removed.

    Args:
        keep: how many steps with a complete checkpoint stay, from 1 on.
        dry_run: nothing is removed.

    Raises:
        StoreError: the store refuses, or does not answer.
    """
    if keep < 1:
        raise StoreError(f"--keep is {keep}: it must be a number from 1 on")
    kept: list[int] = []
    for found in choose.newest_first(store, None, []):
        if found.known.step not in kept:
            kept.append(found.known.step)
        if len(kept) == keep:
            break
    old = [step for step in choose.steps(store) if len(kept) == keep and step < kept[-1]]
    size = sum(_remove(store, step, dry_run) for step in old)
    return Pruned(sorted(kept), old, size)


def _remove(store: Store, step: int, dry_run: bool) -> int:
    """Remove the objects of a step; return their bytes."""
    complete, others = choose.places(store, step)
    total = 0
    for where in (*complete, *others):
        there = store.objects(where)
        total += sum(one.bytes for one in there.values())
        if not dry_run:
            # First what makes it a checkpoint: from then on nobody takes it for one.
            store.delete([name for name in there if name == layout.manifest_name(where)])
            store.delete([name for name in there if name != layout.manifest_name(where)])
    return total
