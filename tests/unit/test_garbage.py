"""Garbage collection is deferred while a newcomer starts, then continues as before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from adaptor import context
from adaptor.worker.garbage import GarbageCollection


class Cycle:
    """An object that only a garbage collection can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collection() -> Iterator[GarbageCollection]:
    thresholds = gc.get_threshold()
    yield GarbageCollection(context.get())
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def is_collected() -> bool:
    """Return whether an unreferenced cycle is freed while many objects are made."""
    reference = weakref.ref(Cycle())
    kept = []
    for _ in range(100_000):
        kept.append([])
        if reference() is None:
            return True
    return False


def test_no_collection_runs_until_it_is_resumed(collection: GarbageCollection) -> None:
    thresholds = gc.get_threshold()
    assert is_collected()
    collection.put_off()
    assert not is_collected()
    collection.put_off()
    collection.resume()
    assert gc.get_threshold() == thresholds
    assert is_collected()


def test_objects_made_meanwhile_are_in_the_oldest_generation(collection: GarbageCollection) -> None:
    """Only a full collection frees them."""
    collection.put_off()
    reference = weakref.ref(Cycle())
    collection.resume()
    gc.collect(1)
    assert reference() is not None
    gc.collect()
    assert reference() is None
    assert gc.get_freeze_count() == 0


def test_thresholds_of_the_script_stay(collection: GarbageCollection) -> None:
    collection.put_off()
    gc.set_threshold(5000, 20, 20)
    collection.resume()
    assert gc.get_threshold() == (5000, 20, 20)


def test_objects_frozen_by_the_script_stay_frozen(collection: GarbageCollection) -> None:
    collection.put_off()
    gc.freeze()
    collection.resume()
    assert gc.get_freeze_count() > 1000
