"""The door's invariants, each by its number in the docstring of `door.py`."""

from __future__ import annotations

import os
import random

import pytest

from adaptor.worker.door import PUBLISH, Door
from tests.unit.threads import LONG_S, Thread, wait_for_waiter, watched


def test_1_a_closed_door_lets_one_step_pass() -> None:
    door = Door()
    changed = watched(door)
    assert door.close(LONG_S)
    with Thread(door.enter, 5) as main:
        wait_for_waiter(changed)
        door.let_through(4)
        wait_for_waiter(changed)  # woken, and waiting again
        assert main.running
        door.let_through(5)
    door.leave()
    with Thread(door.enter, 6) as main:
        wait_for_waiter(changed)
        assert main.running
        door.let_through(6)


def test_1_a_thread_that_comes_after_the_permission_passes() -> None:
    door = Door()
    door.close(LONG_S)
    door.let_through(5)
    door.enter(5)


def test_1_the_publishing_of_a_regular_save_waits_too() -> None:
    door = Door()
    changed = watched(door)
    door.close(LONG_S)
    with Thread(door.enter, PUBLISH) as main:
        wait_for_waiter(changed)
        door.let_through(5)
        wait_for_waiter(changed)
        assert main.running
        door.let_through(PUBLISH)  # only to end the thread


def test_1_the_main_thread_may_shut_the_door_itself() -> None:
    door = Door()
    changed = watched(door)
    door.shut()
    assert door.closed
    with Thread(door.enter, 5) as main:
        wait_for_waiter(changed)
        assert main.running
        door.let_through(5)


def test_2_close_waits_for_the_window_to_end() -> None:
    door = Door()
    changed = watched(door)
    door.enter(5)
    with Thread(door.close, LONG_S) as processor:
        wait_for_waiter(changed)
        assert processor.running
        assert door.closed
        door.leave()
        assert processor.result() is True


def test_2_close_gives_up_after_a_time_and_the_door_stays_closed() -> None:
    door = Door()
    changed = watched(door)
    door.enter(5)
    assert door.close(0.0) is False
    changed.waiting.acquire(blocking=False)
    door.leave()
    with Thread(door.enter, 6) as main:
        wait_for_waiter(changed)
        assert main.running
        door.let_through(6)


def test_2_closing_twice_is_closing_once() -> None:
    door = Door()
    assert door.close(LONG_S)
    assert door.close(0.0)


def test_3_an_open_window_holds_nothing() -> None:
    """While the main thread is inside, other threads query, close and let through without waiting."""
    door = Door()
    door.enter(5)

    def other_threads() -> None:
        assert not door.closed
        assert door.close(0.0) is False
        door.let_through(6)

    with Thread(other_threads):
        pass
    door.leave()


def test_waiting_until_a_window_has_ended() -> None:
    door = Door()
    changed = watched(door)
    ended_flags = []
    door.enter(5)
    with Thread(door.wait_until, lambda: bool(ended_flags), LONG_S) as processor:
        wait_for_waiter(changed)
        ended_flags.append(True)
        door.leave()
        assert processor.result() is True
    assert door.wait_until(lambda: False, 0.0) is False


class Training:
    """A main thread that takes steps until `last`."""

    def __init__(self) -> None:
        self.door = Door()
        self.taken = 0
        self.inside = False
        self.last = -1

    def run(self) -> None:
        while self.taken != self.last:
            self.door.enter(self.taken + 1)
            self.inside = True
            self.taken += 1
            self.inside = False
            self.door.leave()


@pytest.mark.usefixtures("restless")
def test_no_window_opens_behind_a_closed_door_in_any_race() -> None:
    """The processor closes the door at some moment of training, and lets a few steps through."""
    draw = random.Random(7)
    for _ in range(200):
        job = Training()
        with Thread(job.run):
            last, pause = draw.randint(1, 50), draw.randint(0, 100)
            # A sleep would always start at the same points of the race.
            while job.taken < last:
                os.sched_yield()
            for _ in range(pause):
                pass
            assert job.door.close(LONG_S)
            stood_at = job.taken
            job.last = stood_at + 3
            for step in range(stood_at + 1, stood_at + 4):
                assert not job.inside
                assert job.taken == step - 1, "a step that nobody let through"
                job.door.let_through(step)
                assert job.door.wait_until(lambda job=job, step=step: job.taken == step, LONG_S)
                assert job.door.close(LONG_S)
