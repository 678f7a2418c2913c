"""The main thread leaves a call that is about to return with nothing that can be used."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable

import pytest

from adaptor.worker import interruption
from adaptor.worker.interruption import CollectiveEndedError
from adaptor.worker.origin import may_be_an_echo
from tests import waiting


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_a_call_that_comes_back_raises_before_anything_uses_what_it_returns() -> None:
    reader, writer = os.pipe()
    said: list[bool] = []

    def end() -> None:
        said.append(interruption.interrupt())
        os.write(writer, b"?")

    used = []

    def work() -> None:
        used.append(os.read(reader, 1))
        used.append(b"next")

    thread = beside(end)
    with pytest.raises(CollectiveEndedError) as raised:
        work()
    thread.join()
    assert said == [True]
    assert b"next" not in used
    assert may_be_an_echo(raised.value)
    for each in (reader, writer):
        os.close(each)


def test_what_waits_in_a_module_of_python_s_is_left_alone() -> None:
    """It may hold a lock there, as at the door."""
    done, said = threading.Event(), []

    def look() -> None:
        said.append(interruption.interrupt())
        done.set()

    thread = beside(look)
    assert done.wait(60)
    thread.join()
    assert said == [False]


def test_a_main_thread_that_has_come_into_an_update_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = next(iter(sys._current_frames().values()))
    monkeypatch.setattr(interruption, "_place", lambda thread: (frame, 0))
    monkeypatch.setattr(interruption, "_may_raise", lambda frame: True)
    said: list[bool] = []
    beside(lambda: said.append(interruption.interrupt(lambda: False)))
    waiting.until(lambda: bool(said), "it has looked")
    assert said == [False]


def test_a_main_thread_that_runs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = itertools.count()
    monkeypatch.setattr(interruption, "_place", lambda thread: (None, next(places)))
    monkeypatch.setattr(interruption, "_PATIENCE_S", 0.1)
    said: list[bool] = []
    beside(lambda: said.append(interruption.interrupt()))
    waiting.until(lambda: bool(said), "it has looked long enough")
    assert said == [False]
