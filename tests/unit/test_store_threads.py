"""Requests of a store that are made in other threads."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import pytest

from adaptor.store import prefetch, threads


def test_results_come_in_order_and_a_few_calls_run_ahead() -> None:
    lock, begun = threading.Lock(), 0

    def call(number: int) -> int:
        nonlocal begun
        with lock:
            begun += 1
        return number

    taken = []
    for done in prefetch.in_order([partial(call, number) for number in range(20)], "a-test", 3):
        taken.append(done.result())
        with lock:
            assert begun <= len(taken) + 2
    assert taken == list(range(20))


def test_what_is_closed_begins_no_more_calls_and_waits_for_none() -> None:
    release, begun, made = threading.Event(), threading.Event(), []

    def held() -> None:
        begun.set()
        release.wait()

    with contextlib.closing(prefetch.in_order([held, partial(made.append, 1)], "a-test", 1)) as coming:
        first = next(coming)
        assert begun.wait(60)
    assert not first.done()
    release.set()
    first.result(60)
    assert made == []


def test_a_machine_without_threads_makes_each_call_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert threads.call(lambda: 1) == 1
    assert threads.begin(lambda: 2, "a-test").result() == 2
    assert [one.result() for one in prefetch.in_order([lambda: 3, lambda: 4], "a-test")] == [3, 4]
