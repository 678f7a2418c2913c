"""The main thread leaves a call whose result is unusable."""

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


def start_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def wait_for_main_thread_in(*calls: str) -> None:
    """Wait until the main thread is in these calls, innermost first."""
    main = threading.main_thread().ident or 0

    def is_there() -> bool:
        frame = stacks.frame_of(main)
        for name in calls:
            if frame is None or frame.f_code.co_name != name:
                return False
            frame = frame.f_back
        return True

    waiting.until(is_there, f"the main thread is in {calls[0]}")


def test_an_interrupted_call_raises_before_its_result_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort_collectives, "_INTERRUPTION_S", waiting.LONG_S)
    reader, writer = os.pipe()
    interrupted: list[bool] = []

    def end() -> None:
        wait_for_main_thread_in("work")
        interrupted.append(abort_collectives.interrupt())
        os.write(writer, b"?")

    used = []

    def work() -> None:
        used.append(os.read(reader, 1))
        used.append(b"next")

    thread = start_thread(end)
    with pytest.raises(CollectiveEndedError) as raised:
        work()
    thread.join()
    assert interrupted == [True]
    assert b"next" not in used
    assert may_be_an_echo(raised.value)
    for descriptor in (reader, writer):
        os.close(descriptor)


def test_a_wait_in_the_standard_library_is_left_alone() -> None:
    """The interrupted thread may hold a lock, as at the door."""
    finished, interrupted = threading.Event(), []

    def look() -> None:
        # The condition of the event, and the event.
        wait_for_main_thread_in("wait", "wait", "test_a_wait_in_the_standard_library_is_left_alone")
        interrupted.append(abort_collectives.interrupt())
        finished.set()

    thread = start_thread(look)
    assert finished.wait(60)
    thread.join()
    assert interrupted == [False]


def test_a_main_thread_that_has_come_into_an_update_meanwhile_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frame = next(iter(sys._current_frames().values()))
    monkeypatch.setattr(abort_collectives, "_place", lambda thread: (frame, 0))
    monkeypatch.setattr(abort_collectives, "_may_raise", lambda frame: True)
    interrupted: list[bool] = []
    start_thread(lambda: interrupted.append(abort_collectives.interrupt(lambda: False)))
    waiting.until(lambda: bool(interrupted), "it has looked")
    assert interrupted == [False]


def test_a_main_thread_that_runs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = itertools.count()
    monkeypatch.setattr(abort_collectives, "_place", lambda thread: (None, next(places)))
    monkeypatch.setattr(abort_collectives, "_INTERRUPTION_S", 0.1)
    interrupted: list[bool] = []
    start_thread(lambda: interrupted.append(abort_collectives.interrupt()))
    waiting.until(lambda: bool(interrupted), "it has looked long enough")
    assert interrupted == [False]
