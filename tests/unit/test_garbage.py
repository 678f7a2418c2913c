"""Garbage collection is put off while a new process starts, and goes on as before."""

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
    before = gc.get_threshold()
    yield GarbageCollection(context.get())
    gc.unfreeze()
    gc.set_threshold(*before)


def is_found() -> bool:
    """Return whether a cycle that nobody needs is freed while many objects are made."""
    found = weakref.ref(Cycle())
    kept = []
    for _ in range(100_000):
        kept.append([])
        if found() is None:
            return True
    return False


def test_nothing_is_looked_for_until_it_goes_on(collection: GarbageCollection) -> None:
    before = gc.get_threshold()
    assert is_found()
    collection.put_off()
    assert not is_found()
    collection.put_off()
    collection.resume()
    assert gc.get_threshold() == before
    assert is_found()


def test_what_was_made_meanwhile_is_garbage_of_the_last_resort(collection: GarbageCollection) -> None:
    """It is freed by a look at everything, and by no earlier one."""
    collection.put_off()
    left = weakref.ref(Cycle())
    collection.resume()
    gc.collect(1)
    assert left() is not None
    gc.collect()
    assert left() is None
    assert gc.get_freeze_count() == 0


def test_thresholds_of_the_script_stay(collection: GarbageCollection) -> None:
    collection.put_off()
    gc.set_threshold(5000, 20, 20)
    collection.resume()
    assert gc.get_threshold() == (5000, 20, 20)


def test_what_the_script_has_frozen_stays_frozen(collection: GarbageCollection) -> None:
    collection.put_off()
    gc.freeze()
    collection.resume()
    assert gc.get_freeze_count() > 1000
