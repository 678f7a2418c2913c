"""The main thread leaves a call that is about to return with nothing that can be used."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable

import pytest

from adaptor.worker import abort_collectives, stacks
from adaptor.worker.abort_collectives import CollectiveEndedError
from adaptor.worker.origin import may_be_an_echo
from tests import waiting


def beside(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def comes_to(*calls: str) -> None:
    """Wait until the main thread is in these calls, the innermost first."""
    main = threading.main_thread().ident or 0

    def is_there() -> bool:
        frame = stacks.frame_of(main)
        for name in calls:
            if frame is None or frame.f_code.co_name != name:
                return False
            frame = frame.f_back
        return True

    waiting.until(is_there, f"the main thread is in {calls[0]}")


def test_a_call_that_comes_back_raises_before_anything_uses_what_it_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(abort_collectives, "_INTERRUPTION_S", waiting.LONG_S)
    reader, writer = os.pipe()
    said: list[bool] = []

    def end() -> None:
        comes_to("work")
        said.append(abort_collectives.interrupt())
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
        # The condition of the event, and the event.
        comes_to("wait", "wait", "test_what_waits_in_a_module_of_python_s_is_left_alone")
        said.append(abort_collectives.interrupt())
        done.set()

    thread = beside(look)
    assert done.wait(60)
    thread.join()
    assert said == [False]


def test_a_main_thread_that_has_come_into_an_update_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = next(iter(sys._current_frames().values()))
    monkeypatch.setattr(abort_collectives, "_place", lambda thread: (frame, 0))
    monkeypatch.setattr(abort_collectives, "_may_raise", lambda frame: True)
    said: list[bool] = []
    beside(lambda: said.append(abort_collectives.interrupt(lambda: False)))
    waiting.until(lambda: bool(said), "it has looked")
    assert said == [False]


def test_a_main_thread_that_runs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = itertools.count()
    monkeypatch.setattr(abort_collectives, "_place", lambda thread: (None, next(places)))
    monkeypatch.setattr(abort_collectives, "_INTERRUPTION_S", 0.1)
    said: list[bool] = []
    beside(lambda: said.append(abort_collectives.interrupt()))
    waiting.until(lambda: bool(said), "it has looked long enough")
    assert said == [False]
