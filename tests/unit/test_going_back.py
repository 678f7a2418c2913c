"""A rank with a local copy needs no barrier, and provides the step before its last update from the copy."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from adaptor.protocol.messages import Phase
from tests.unit.test_session import Worker, make, record
from tests.unit.threads import LONG_S, Thread, wait_for_waiter


@pytest.fixture
def copying() -> Iterator[Worker]:
    """A worker without a barrier that has finished step 5."""
    for worker in make():
        worker.trainee.has_local_copy = True
        worker.trainee.barrier = lambda: pytest.fail("a barrier")
        worker.loop.begin(4)
        worker.loop.step(5)
        yield worker


def test_a_rank_that_has_finished_an_update_gives_the_step_before_it(copying: Worker) -> None:
    assert copying.gives == [4, 5]
    assert (copying.trainee.copied, copying.trainee.weights) == (4, 5)
    assert [copying.session.from_local_copy(step) for step in (4, 5)] == [True, False]
    copying.session.begin_step(6)
    assert copying.gives == [4, 5]
    assert [copying.session.record_of(step) for step in (4, 5)] == [record(4), record(5)]


def test_the_copy_is_taken_inside_the_window(copying: Worker) -> None:
    """A freeze waits for the end of the copy, which is not provided meanwhile."""
    states = []

    def half_way() -> None:
        states.append((copying.board.phase_name, copying.gives, copying.session.freezer.freeze(0.0)))

    copying.trainee.on_copy = half_way
    copying.session.begin_step(6)
    copying.session.before_update(copying.loop.inner[0])
    assert states == [("READY", [5, 6], None)]
    assert copying.stands == ("UPDATING", 5, 5)
    assert copying.gives == [5, 6]
    assert copying.session.from_local_copy(5)
    assert copying.session.record_of(5) == record(5)
    copying.session.after_update(copying.loop.inner[0])
    assert copying.gives == [5, 6]


def test_a_frozen_rank_takes_no_copy(copying: Worker) -> None:
    copying.frozen()
    copying.trainee.on_copy = lambda: pytest.fail("a copy behind the closed door")
    with Thread(copying.loop.step, 6) as main:
        wait_for_waiter(copying.changed)
        assert main.running
        assert copying.gives == [4, 5, 6]
        copying.bring_to(4, lambda: 0, LONG_S)
        assert copying.session.from_local_copy(4)
        assert (copying.trainee.copied, copying.session.record_of(4)) == (4, record(4))
        copying.trainee.on_copy = lambda: None
        copying.bring_to(6, lambda: 0, LONG_S)
        main.result()
    assert copying.gives == [5, 6]


def test_a_rank_that_was_let_through_goes_back(copying: Worker) -> None:
    """After the update the copy holds the older step's state."""
    copying.frozen()
    inside, go_on = threading.Event(), threading.Event()

    def half_way() -> None:
        inside.set()
        assert go_on.wait(LONG_S)

    copying.trainee.on_copy = half_way
    with Thread(copying.loop.step, 6) as main:
        wait_for_waiter(copying.changed)
        copying.session.door.let_through(6)
        assert inside.wait(LONG_S)
        copying.session.door.let_through(5)
        with pytest.raises(TimeoutError):
            copying.session.freezer.bring_to(5, lambda: 0, 0.0)
        go_on.set()
        copying.session.freezer.bring_to(5, lambda: 0, LONG_S)
        main.result()
    assert copying.session.from_local_copy(5)
    assert (copying.trainee.copied, copying.trainee.weights) == (5, 6)


def test_a_permission_that_was_not_used_is_taken_back(copying: Worker) -> None:
    copying.frozen()
    copying.session.door.let_through(6)
    copying.bring_to(5, lambda: 0, LONG_S)
    with Thread(copying.loop.step, 6) as main:
        wait_for_waiter(copying.changed)
        assert main.running
        assert not copying.session.from_local_copy(5)
        assert copying.trainee.weights == 5
        copying.session.door.let_through(6)


def test_an_exception_in_the_update_leaves_the_copy(copying: Worker) -> None:
    copying.session.begin_step(6)
    copying.session.before_update(copying.loop.inner[0])
    copying.session.window.give_up()
    board = copying.frozen()
    assert board.phase is Phase.BROKEN
    assert copying.gives == [5]
    copying.bring_to(5, lambda: pytest.fail("woken"), 0.0)
    assert copying.session.from_local_copy(5)
    assert copying.session.record_of(5) == record(5)


def test_an_exception_in_the_copy_leaves_the_state(copying: Worker) -> None:
    def fails() -> None:
        raise MemoryError("no room for a copy")

    copying.trainee.on_copy = fails
    copying.session.begin_step(6)
    with pytest.raises(MemoryError):
        copying.session.before_update(copying.loop.inner[0])
    copying.session.window.give_up()
    assert copying.frozen().phase is Phase.RUNNING
    assert copying.gives == [5]
    assert not copying.session.from_local_copy(5)
    assert copying.session.record_of(5) == record(5)


def test_skipped_steps_and_the_copy(copying: Worker) -> None:
    copying.loop.skip(6)
    assert copying.gives == [4, 5, 6]
    assert [copying.session.from_local_copy(step) for step in (4, 5, 6)] == [True, False, False]
    copying.loop.step(7)
    assert copying.gives == [5, 6, 7]
    assert [copying.session.from_local_copy(step) for step in (5, 6, 7)] == [True, True, False]
    copying.session.begin_step(8)
    expected = {5: record(5), 6: record(6, 1023.0), 7: record(7, 1023.0)}
    assert {step: copying.session.record_of(step) for step in expected} == expected


@pytest.mark.usefixtures("restless")
def test_a_frozen_rank_holds_every_step_that_it_offers_in_any_race() -> None:
    """The rank trains at full speed and skips every fifth step; then it is brought forward to a step, or
    back.
    """
    draw = random.Random(5)
    for _ in range(200):
        jobs = make()
        worker = next(jobs)
        worker.trainee.has_local_copy = True
        stop = threading.Event()
        worker.loop.begin(1)
        # From here on step 1 can be requested; before, there is nothing to save.
        worker.session.begin_step(2)

        def train(worker: Worker = worker, stop: threading.Event = stop) -> None:
            step = 1
            while not stop.is_set():
                step += 1
                (worker.loop.skip if step % 5 == 0 else worker.loop.step)(step)

        def check(step: int, worker: Worker = worker) -> None:
            worker.bring_to(step, lambda: 0, LONG_S)
            trainee = worker.trainee
            tensors = trainee.copied if worker.session.from_local_copy(step) else trainee.weights
            assert tensors == (step - 1 if step % 5 == 0 else step)
            assert worker.session.record_of(step) == record(step, 1024.0 - step // 5)

        with Thread(train) as main:
            last, pause = draw.randint(1, 30), draw.randint(0, 100)
            # A sleep would always start at the same points of the race.
            while worker.session.board.finished < last:
                os.sched_yield()
            for _ in range(pause):
                pass
            board = worker.frozen()
            first = draw.choice([s for s in range(board.oldest, board.finished + 2) if board.provides(s)])
            check(first)
            check(draw.choice([step for step in (first - 1, first) if worker.board.provides(step)]))
            stop.set()
            while main.running:
                worker.session.door.let_through(worker.session.board.finished + 1)
        next(jobs, None)
