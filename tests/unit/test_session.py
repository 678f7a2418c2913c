"""The session: what the main thread tells the board, and what the processor may take of it at any moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from adaptor.control.board import Board, BoardMemory
from adaptor.control.messages import BoardRecord, Phase
from adaptor.control.session import Session
from tests.unit.threads import LONG_S, Thread, Watched, wait_for_waiter, watched
from tests.unit.trainee import BATCH, CountingTrainee, Loop, Record


@dataclass
class Worker:
    """A session with its board, a training state and a loop."""

    session: Session
    memory: BoardMemory
    trainee: CountingTrainee
    loop: Loop
    changed: Watched
    said: list[tuple[object, int]] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)

    @property
    def board(self) -> BoardRecord:
        """What the agent reads."""
        return self.memory.read(0)

    @property
    def stands(self) -> tuple[str, int, int]:
        """Phase, oldest and finished step on the board."""
        return self.board.phase_name, self.board.oldest, self.board.finished

    @property
    def gives(self) -> list[int]:
        """The steps that it provides."""
        return [step for step in range(20) if self.board.provides(step)]

    def bring_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> None:
        """As the processor does it."""
        self.session.let_through(step)
        self.session.bring_to(step, wake, timeout_s)

    def frozen(self) -> BoardRecord:
        board = self.session.freeze(LONG_S)
        assert board is not None
        return board


def make(optimizers: int = 1) -> Iterator[Worker]:
    memory = BoardMemory([0])
    said: list[tuple[object, int]] = []
    broke: list[str] = []
    session = Session(
        Board(0, memory.path, memory.slots),
        lambda *heard: said.append(heard),
        lambda error: broke.append(error),
    )
    trainee = CountingTrainee()
    yield Worker(
        session, memory, trainee, Loop(session, trainee, optimizers), watched(session.door), said, broke
    )
    memory.close()


@pytest.fixture
def worker() -> Iterator[Worker]:
    yield from make()


@pytest.fixture
def chain_of_two() -> Iterator[Worker]:
    yield from make(optimizers=2)


@pytest.fixture
def frozen() -> Iterator[Worker]:
    yield from make(optimizers=0)


def record(step: int, scale: float = 1024.0) -> Record:
    """What a trainee that began at step 0 has at the end of `step`."""
    return Record(step, step * BATCH, scale)


# the board


def test_before_training_begins_nothing_is_promised(worker: Worker) -> None:
    assert worker.stands == ("STARTING", -1, -1)
    worker.session.begin_step(1)
    worker.session.before_update(worker.loop.inner[0])
    worker.session.after_update(worker.loop.inner[0])
    worker.session.end_update(True, 1.0)
    assert worker.stands == ("STARTING", -1, -1)
    assert not any(worker.frozen().provides(step) for step in range(-2, 3))


def test_steps_are_told_to_the_board(worker: Worker) -> None:
    worker.loop.begin(4)
    assert worker.said == [(worker.trainee, 4)]
    assert worker.stands == ("RUNNING", 4, 4)
    worker.loop.step(5)
    assert worker.stands == ("RUNNING", 5, 5)
    worker.session.begin_step(6)
    assert worker.stands == ("RUNNING", 5, 5)
    worker.session.before_update(worker.loop.inner[0])
    assert worker.stands == ("UPDATING", 6, 5)
    assert worker.board.ahead == 6
    worker.session.after_update(worker.loop.inner[0])
    assert worker.stands == ("RUNNING", 6, 6)
    assert worker.board.grad_norm == 1.5  # of step 5: that of step 6 comes with the next write


def test_the_board_says_ready_before_the_barrier(worker: Worker) -> None:
    seen = []
    worker.trainee.barrier = lambda: seen.append((worker.stands, worker.board.ahead))
    worker.loop.begin(4)
    worker.loop.step(5)
    assert seen == [(("READY", 4, 4), 5)]


def test_the_first_of_a_chain_opens_the_window_and_the_last_closes_it(chain_of_two: Worker) -> None:
    worker, (first, last) = chain_of_two, chain_of_two.loop.inner
    worker.loop.begin(4)
    worker.session.begin_step(5)
    barriers = []
    worker.trainee.barrier = lambda: barriers.append(1)
    worker.session.before_update(first)
    worker.session.after_update(first)
    assert worker.stands == ("UPDATING", 5, 4)
    worker.session.before_update(last)
    worker.session.after_update(last)
    assert worker.stands == ("RUNNING", 5, 5)
    assert barriers == [1]


def test_a_rank_that_trains_nothing_passes_the_door_with_the_others(frozen: Worker) -> None:
    worker = frozen
    seen = []
    worker.trainee.barrier = lambda: seen.append((worker.stands, worker.board.ahead))
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.update_nothing()
    worker.session.end_update(True, 1.5)
    assert seen == [(("READY", 4, 4), 5)]
    assert worker.stands == ("RUNNING", 5, 5)


def test_who_trains_something_has_the_door_in_its_optimizer(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.update_nothing()
    assert worker.stands == ("RUNNING", 4, 4)


def test_an_optimizer_of_someone_else_is_no_update(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(object())
    assert worker.stands == ("RUNNING", 4, 4)
    worker.session.before_update(worker.loop.inner[0])
    worker.session.after_update(object())
    assert worker.stands == ("UPDATING", 5, 4)


def test_a_skipped_step_leaves_the_state_of_the_one_before(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    worker.loop.skip(6)
    worker.loop.skip(7)
    assert worker.stands == ("RUNNING", 5, 7)
    assert [step for step in range(10) if worker.frozen().provides(step)] == [5, 6, 7]


def test_skipped_steps_before_the_first_update_are_none_to_save(worker: Worker) -> None:
    worker.trainee.updated_once = False
    worker.loop.begin(0)
    worker.loop.skip(1)
    worker.loop.skip(2)
    assert worker.stands == ("RUNNING", 0, 0)
    worker.loop.step(3)
    assert worker.stands == ("RUNNING", 3, 3)


def test_steps_that_the_framework_leaves_out_count_as_skipped(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    worker.trainee.samples += 2 * BATCH  # steps 6 and 7
    worker.session.begin_step(8)
    assert worker.stands == ("RUNNING", 5, 7)
    assert worker.session.record_of(7) == record(7)
    assert worker.session.record_of(5) == record(5), "a rank that has not come so far gives step 5"


def test_steps_that_are_left_out_at_the_start(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.trainee.samples += 2 * BATCH
    worker.session.begin_step(7)
    assert worker.stands == ("RUNNING", 4, 6)
    assert worker.session.record_of(6) == record(6)


# records


def test_the_record_of_a_finished_step_is_derived_until_the_next_step_begins(worker: Worker) -> None:
    worker.loop.begin(0)
    worker.session.begin_step(1)
    worker.loop.update(1)
    assert worker.trainee.samples == 0  # the framework has yet to count
    assert worker.session.record_of(1) == record(1)
    assert worker.trainee.derived == [1]
    worker.trainee.samples += BATCH
    assert worker.session.record_of(1) == record(1)
    worker.session.begin_step(2)
    assert worker.session.record_of(1) == record(1)
    assert worker.trainee.derived == [1, 1], "once the step has begun its record has been taken"


def test_a_record_at_the_door(worker: Worker) -> None:
    """Both the step before the door and the one behind it."""
    worker.loop.begin(0)
    worker.loop.step(1)
    worker.session.begin_step(2)
    worker.session.before_update(worker.loop.inner[0])
    assert worker.session.record_of(1) == record(1)
    assert worker.session.record_of(2) == record(2)


def test_records_of_skipped_steps(worker: Worker) -> None:
    worker.loop.begin(0)
    worker.loop.step(1)
    worker.loop.skip(2)
    worker.loop.skip(3)
    expected = {1: record(1), 2: record(2, 1023.0), 3: record(3, 1022.0)}
    assert {step: worker.session.record_of(step) for step in expected} == expected
    worker.session.begin_step(4)
    assert {step: worker.session.record_of(step) for step in expected} == expected
    worker.loop.update(4)
    assert worker.session.record_of(4) == Record(4, 4 * BATCH, 1022.0)


def test_only_records_that_may_be_asked_for_are_kept(worker: Worker) -> None:
    worker.loop.begin(0)
    for step in range(1, 50):
        worker.loop.step(step)
    worker.session.begin_step(50)
    assert worker.session.record_of(49) == record(49)
    for step in (47, 50, 51):
        with pytest.raises(LookupError, match=f"step {step} "):
            worker.session.record_of(step)


def test_training_that_begins_again_has_no_older_steps(worker: Worker) -> None:
    worker.loop.begin(0)
    worker.loop.step(1)
    worker.loop.begin(10)
    assert worker.stands == ("RUNNING", 10, 10)
    with pytest.raises(LookupError):
        worker.session.record_of(1)


def test_a_record_can_be_had_while_the_main_thread_takes_it(worker: Worker) -> None:
    """A dump that starts in the very moment in which the next step begins: no lock, and no gap."""
    taken = []

    def dump_at_this_moment() -> None:
        with Thread(worker.session.record_of, worker.board.finished) as dump:
            taken.append(dump.result())

    worker.loop.begin(0)
    worker.session.begin_step(1)
    worker.trainee.on_record = dump_at_this_moment
    for step in range(1, 6):
        worker.loop.update(step)
        worker.trainee.samples += BATCH
        worker.session.begin_step(step + 1)
    worker.loop.skip(6)
    worker.session.begin_step(7)
    assert taken == [record(step) for step in (1, 2, 3, 4, 5, 5)] + [record(6, 1023.0)]


@pytest.mark.usefixtures("restless")
def test_records_in_any_race(worker: Worker) -> None:
    """The main thread trains as fast as it can, every fifth step is skipped; what is found is right."""
    stop = threading.Event()
    worker.loop.begin(0)

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            (worker.loop.skip if step % 5 == 0 else worker.loop.step)(step)

    with Thread(train):
        try:
            for _ in range(2000):
                step = worker.session.board.finished
                try:
                    found = worker.session.record_of(step)
                except LookupError:
                    assert worker.session.board.finished > step or step == 0
                else:
                    assert found == record(step, 1024.0 - step // 5)
        finally:
            stop.set()


# freezing


def test_a_freeze_between_updates(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    board = worker.frozen()
    assert (board.phase, board.finished) == (Phase.RUNNING, 5)
    worker.session.begin_step(6)
    with Thread(worker.session.before_update, worker.loop.inner[0]) as main:
        wait_for_waiter(worker.changed)
        assert main.running
        assert worker.stands == ("READY", 5, 5)
        worker.session.door.let_through(6)
    assert worker.stands == ("UPDATING", 6, 5)


def test_a_freeze_during_the_update_waits_for_its_end(chain_of_two: Worker) -> None:
    worker, (first, last) = chain_of_two, chain_of_two.loop.inner
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(first)
    with Thread(worker.session.freeze, LONG_S) as processor:
        wait_for_waiter(worker.changed)
        worker.session.after_update(first)
        worker.session.before_update(last)
        assert processor.running
        worker.session.after_update(last)
        board = processor.result()
    assert (board.phase_name, board.finished) == ("RUNNING", 5)
    assert board.provides(5)
    assert not board.provides(4)


def test_a_freeze_that_comes_in_vain_promises_nothing(worker: Worker) -> None:
    """The update does not end, or a regular save is being published: this rank is no holder."""
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(worker.loop.inner[0])
    assert worker.session.freeze(0.0) is None


def test_a_freeze_while_a_regular_save_is_published(worker: Worker) -> None:
    acted = []
    worker.session.publishing(lambda: acted.append(worker.session.freeze(0.0)))
    assert acted == [None]
    worker.changed.waiting.acquire(blocking=False)
    with Thread(worker.session.publishing, lambda: acted.append("again")) as main:
        wait_for_waiter(worker.changed)
        assert main.running
        assert acted == [None]
        worker.session.door.let_through(-1)


def test_a_save_that_fails_leaves_the_window(worker: Worker) -> None:
    def fails() -> None:
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        worker.session.publishing(fails)
    assert worker.session.freeze(0.0) is not None


def test_a_freeze_waits_for_an_update_that_an_exception_leaves(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(worker.loop.inner[0])
    with Thread(worker.session.freeze, LONG_S) as processor:
        wait_for_waiter(worker.changed)
        worker.session.give_up()
        board = processor.result()
    assert not any(board.provides(step) for step in range(10))


# through the door


def test_a_broken_barrier_counts_as_ready(worker: Worker) -> None:
    def broken() -> None:
        raise RuntimeError("Connection closed by peer")

    worker.loop.begin(4)
    worker.trainee.barrier = broken
    with Thread(worker.loop.step, 5) as main:
        wait_for_waiter(worker.changed)
        assert worker.broke == ["RuntimeError: Connection closed by peer"]
        board = worker.frozen()
        assert (board.phase_name, board.provides(4), board.provides(5)) == ("READY", True, True)
        assert worker.session.record_of(4).step == 4
        assert worker.trainee.weights == 4
        woken = []

        def wake() -> int:
            woken.append(1)
            worker.session.let_through(5)  # not before: the main thread might need no waking then
            return 1

        worker.session.bring_to(5, wake, LONG_S)
        assert woken == [1]
        main.result()
    assert worker.trainee.weights == 5
    assert worker.stands == ("RUNNING", 5, 5)
    assert worker.session.record_of(5) == Record(5, 5 * BATCH, 1024.0)


def test_a_barrier_that_hangs_is_woken(worker: Worker) -> None:
    shut = threading.Event()

    def hangs() -> None:
        assert shut.wait(LONG_S)
        raise RuntimeError("Socket closed")

    worker.loop.begin(4)
    worker.trainee.barrier = hangs
    with Thread(worker.loop.step, 5):
        while worker.board.phase != Phase.READY:
            pass
        assert worker.frozen().provides(5)
        worker.bring_to(5, lambda: shut.set() or 1, LONG_S)
        assert worker.stands == ("RUNNING", 5, 5)


def test_a_barrier_that_holds_after_the_door_was_closed(worker: Worker) -> None:
    """Everyone had come, so it does not break, but an incident is open meanwhile: the update waits."""
    worker.loop.begin(4)
    worker.trainee.barrier = lambda: worker.frozen() and None
    with Thread(worker.loop.step, 5) as main:
        wait_for_waiter(worker.changed)
        assert worker.stands == ("READY", 4, 4)
        assert worker.broke == []
        worker.bring_to(5, lambda: 0, LONG_S)
        main.result()


def test_who_has_told_not_to_be_ready_keeps_the_others_from_the_update(worker: Worker) -> None:
    """They may not be frozen yet: the barrier would let them make an update that nobody reckons with."""
    came: list[int] = []
    worker.trainee.barrier = lambda: came.append(1)
    worker.loop.begin(4)
    assert not worker.frozen().provides(5)
    with Thread(worker.loop.step, 5) as main:
        wait_for_waiter(worker.changed)
        assert worker.stands == ("READY", 4, 4)
        assert came == worker.broke == []
        worker.bring_to(5, lambda: 0, LONG_S)
        main.result()


def test_the_next_step_stays_behind_the_door(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.frozen()
    with Thread(lambda: [worker.loop.step(step) for step in (5, 6)]) as main:
        wait_for_waiter(worker.changed)
        worker.bring_to(5, lambda: 0, LONG_S)
        while worker.board.phase != Phase.READY:
            pass
        assert worker.stands == ("READY", 5, 5)
        assert worker.trainee.weights == 5
        assert worker.session.record_of(5) == Record(5, 5 * BATCH, 1024.0)
        assert main.running
        worker.bring_to(6, lambda: 0, LONG_S)


def test_a_rank_that_is_there_is_not_woken(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    worker.frozen()
    worker.bring_to(5, lambda: pytest.fail("woken"), 0.0)


def test_an_update_that_does_not_end_is_not_waited_for(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(worker.loop.inner[0])
    with pytest.raises(TimeoutError, match="the update of step 5 was not done after 0 s"):
        worker.bring_to(5, lambda: 0, 0.0)


def test_an_update_that_raises_is_not_waited_for(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.frozen()

    def update_raises() -> None:
        worker.session.begin_step(5)
        worker.session.before_update(worker.loop.inner[0])
        worker.session.give_up()

    with Thread(update_raises):
        wait_for_waiter(worker.changed)
        with pytest.raises(RuntimeError, match="an exception left the update of step 5"):
            worker.bring_to(5, lambda: 0, LONG_S)
