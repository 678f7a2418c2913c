"""The session: the main thread's reports to the board, and the state the processor may read at any moment."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from adaptor.errors import StepError, UnsupportedError
from adaptor.library import Protection
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import BoardRecord, Phase
from adaptor.worker.session import Session
from tests import waiting
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
    reports: list[tuple[object, int]] = field(default_factory=list)
    broke: list[str] = field(default_factory=list)
    protected: list[int] = field(default_factory=list)

    @property
    def board(self) -> BoardRecord:
        """The board as the agent reads it."""
        return self.memory.read(0)

    @property
    def stands(self) -> tuple[str, int, int]:
        """Phase, oldest and finished step on the board."""
        return self.board.phase_name, self.board.oldest, self.board.finished

    @property
    def gives(self) -> list[int]:
        """The steps that the worker provides."""
        return [step for step in range(20) if self.board.provides(step)]

    def bring_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> None:
        """Bring the worker to a step as the processor does."""
        self.session.door.let_through(step)
        self.session.freezer.bring_to(step, wake, timeout_s)

    def frozen(self) -> BoardRecord:
        board = self.session.freezer.freeze(LONG_S)
        assert board is not None
        return board


def make(optimizers: int = 1) -> Iterator[Worker]:
    memory = BoardMemory([0])
    reports: list[tuple[object, int]] = []
    broke: list[str] = []
    protected: list[int] = []
    session = Session(
        Board(0, memory.path, memory.slots),
        lambda *report: reports.append(report),
        lambda error: broke.append(error),
        lambda trainee, step: protected.append(step),
    )
    trainee = CountingTrainee()
    loop = Loop(session, trainee, optimizers)
    yield Worker(session, memory, trainee, loop, watched(session.door), reports, broke, protected)
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
    """Return the record at the end of `step` of a trainee that began at step 0."""
    return Record(step, step * BATCH, scale)


# the board


def test_before_training_no_step_is_provided(worker: Worker) -> None:
    assert worker.stands == ("STARTING", -1, -1)
    worker.session.begin_step(1)
    worker.session.before_update(worker.loop.inner[0])
    worker.session.after_update(worker.loop.inner[0])
    worker.session.end_update(True, 1.0)
    assert worker.stands == ("STARTING", -1, -1)
    assert not any(worker.frozen().provides(step) for step in range(-2, 3))


def test_steps_are_written_to_the_board(worker: Worker) -> None:
    worker.loop.begin(4)
    assert worker.reports == [(worker.trainee, 4)]
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
    assert worker.board.grad_norm == 1.5  # of step 5: the norm of step 6 comes with the next write


def test_the_board_says_ready_before_the_barrier(worker: Worker) -> None:
    at_barrier = []
    worker.trainee.barrier = lambda: at_barrier.append((worker.stands, worker.board.ahead))
    worker.loop.begin(4)
    worker.loop.step(5)
    assert at_barrier == [(("READY", 4, 4), 5)]


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
    at_barrier = []
    worker.trainee.barrier = lambda: at_barrier.append((worker.stands, worker.board.ahead))
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.update_nothing()
    worker.session.end_update(True, 1.5)
    assert at_barrier == [(("READY", 4, 4), 5)]
    assert worker.stands == ("RUNNING", 5, 5)


def test_a_training_rank_has_the_door_in_its_optimizer(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.update_nothing()
    assert worker.stands == ("RUNNING", 4, 4)


def test_another_optimizer_makes_no_update(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(object())
    assert worker.stands == ("RUNNING", 4, 4)
    worker.session.before_update(worker.loop.inner[0])
    worker.session.after_update(object())
    assert worker.stands == ("UPDATING", 5, 4)


def test_the_step_of_another_optimizer_ends_no_step(worker: Worker, frozen: Worker) -> None:
    """For example a discriminator's, before the trained optimizer has made its update."""
    for ranks_worker in (worker, frozen):
        ranks_worker.loop.begin(4)
        ranks_worker.session.begin_step(5, ends_with_update=True)
        ranks_worker.session.end_update(False, 7.0, [object()])
        assert (ranks_worker.board.finished, ranks_worker.board.inside, ranks_worker.board.grad_norm) == (
            4,
            5,
            0.0,
        )
    worker.session.end_update(False, 1.5, worker.loop.inner)
    frozen.session.end_update(False, 1.5, [])
    assert worker.board.inside == frozen.board.inside == -1


Tell = Callable[[Worker], None]
TOLD: dict[str, Tell] = {
    "by torch's hooks of all optimizers": lambda worker: worker.session.require_hooks(worker.loop.inner[0]),
    "by the framework": lambda worker: worker.session.end_update(True, 1.5, worker.loop.inner),
}


@pytest.mark.robustness(
    "A1",
    "an optimizer's own `step` is replaced in the middle of training",
    "one line; that rank is no holder",
)
@pytest.mark.parametrize("tell", TOLD.values(), ids=TOLD)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_an_update_without_a_hook(optimizers: int, tell: Tell) -> None:
    for worker in make(optimizers):
        worker.trainee.has_local_copy = True
        worker.loop.begin(4)
        worker.loop.step(5)
        worker.session.begin_step(6)
        worker.trainee.weights = 6
        with pytest.raises(UnsupportedError, match="step 6 has an update of object that no hook has told of"):
            tell(worker)
        assert worker.board.phase_name == "BROKEN"
        assert worker.gives == [], "the state of step 5 is gone, and step 6 has passed no door"


def test_one_of_two_optimizers_that_tells_of_no_update(chain_of_two: Worker) -> None:
    worker, (first, last) = chain_of_two, chain_of_two.loop.inner
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(first)
    worker.session.require_hooks(last)
    worker.session.after_update(first)
    worker.session.require_hooks(first)
    worker.session.end_update(True, 1.5, [first])  # as in older chains: the second optimizer may follow
    assert worker.stands == ("UPDATING", 5, 4)
    with pytest.raises(UnsupportedError, match="no hook has told of"):
        worker.session.end_update(True, 1.5, [first, last])
    assert worker.gives == []
    assert not worker.session.window.is_open


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
    worker.trainee.samples += 2 * BATCH  # steps 6 and 7 are left out
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
    assert worker.trainee.samples == 0  # the framework has not counted yet
    assert worker.session.record_of(1) == record(1)
    assert worker.trainee.derived == [1]
    worker.trainee.samples += BATCH
    assert worker.session.record_of(1) == record(1)
    worker.session.begin_step(2)
    assert worker.session.record_of(1) == record(1)
    assert worker.trainee.derived == [1, 1], "once the step has begun its record has been taken"


def test_a_record_at_the_door(worker: Worker) -> None:
    """For the step before the door and for the step behind it."""
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


def test_only_needed_records_are_kept(worker: Worker) -> None:
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
    """A dump starts just as the next step begins: no lock is held and no record is missing."""
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
    """The main thread trains at full speed, skipping every fifth step; every record found is right."""
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
                    state = worker.session.record_of(step)
                except LookupError:
                    assert worker.session.board.finished > step or step == 0
                else:
                    assert state == record(step, 1024.0 - step // 5)
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
    with Thread(worker.session.freezer.freeze, LONG_S) as processor:
        wait_for_waiter(worker.changed)
        worker.session.after_update(first)
        worker.session.before_update(last)
        assert processor.running
        worker.session.after_update(last)
        board = processor.result()
    assert (board.phase_name, board.finished) == ("RUNNING", 5)
    assert board.provides(5)
    assert not board.provides(4)


def test_a_freeze_that_times_out_provides_no_step(worker: Worker) -> None:
    """The update does not end, or a regular save is being published: this rank is no holder."""
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(worker.loop.inner[0])
    assert worker.session.freezer.freeze(0.0) is None


def test_a_repeated_freeze_that_comes_after_the_recovery_closes_nothing(worker: Worker) -> None:
    """Each order has a thread; the thread of a later order may be faster."""
    worker.loop.begin(4)
    assert worker.session.freezer.freeze(LONG_S) is not None
    worker.session.door.open()
    assert worker.session.freezer.freeze(LONG_S, is_repeated=True) is not None
    assert not worker.session.door.closed


def test_a_freeze_while_a_regular_save_is_published(worker: Worker) -> None:
    acted = []
    worker.session.publishing(lambda: acted.append(worker.session.freezer.freeze(0.0)))
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
    assert worker.session.freezer.freeze(0.0) is not None


def test_a_freeze_waits_for_an_update_that_an_exception_leaves(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.before_update(worker.loop.inner[0])
    with Thread(worker.session.freezer.freeze, LONG_S) as processor:
        wait_for_waiter(worker.changed)
        worker.session.window.give_up()
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
            worker.session.door.let_through(5)  # not earlier, or the main thread might need no waking
            return 1

        worker.session.freezer.bring_to(5, wake, LONG_S)
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
        waiting.until(lambda: worker.board.phase == Phase.READY, "it is at the barrier")
        assert worker.frozen().provides(5)
        worker.bring_to(5, lambda: shut.set() or 1, LONG_S)
        assert worker.stands == ("RUNNING", 5, 5)


def test_a_barrier_that_holds_after_the_door_was_closed(worker: Worker) -> None:
    """All ranks came, so the barrier does not break, but an incident is open: the update waits."""
    worker.loop.begin(4)
    worker.trainee.barrier = lambda: worker.frozen() and None
    with Thread(worker.loop.step, 5) as main:
        wait_for_waiter(worker.changed)
        assert worker.stands == ("READY", 4, 4)
        assert worker.broke == []
        worker.bring_to(5, lambda: 0, LONG_S)
        main.result()


def test_a_rank_that_is_not_ready_holds_the_others_before_the_update(worker: Worker) -> None:
    """Without a freeze the barrier would admit an update that the controller does not expect."""
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


def test_state_moves_to_other_memory_only_while_no_incident_is_open(worker: Worker) -> None:
    """A freeze waits for the end of a move; a move waits for the end of the incident."""
    worker.loop.begin(4)
    worker.session.begin_step(5)
    moved = threading.Event()

    def move() -> None:
        with worker.session.moving_state():
            moved.set()

    first = contextlib.ExitStack()
    first.enter_context(worker.session.moving_state())
    with Thread(worker.frozen) as freeze:
        wait_for_waiter(worker.changed)
        assert freeze.running
        first.close()
    assert worker.stands == ("RUNNING", 4, 4)
    with Thread(move):
        wait_for_waiter(worker.changed)
        assert not moved.is_set()
        worker.session.door.open()
    assert moved.is_set()


def test_the_next_step_stays_behind_the_door(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.frozen()
    with Thread(lambda: [worker.loop.step(step) for step in (5, 6)]) as main:
        wait_for_waiter(worker.changed)
        worker.bring_to(5, lambda: 0, LONG_S)
        waiting.until(lambda: worker.board.phase == Phase.READY, "it is at the barrier")
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
        worker.session.window.give_up()

    with Thread(update_raises):
        wait_for_waiter(worker.changed)
        with pytest.raises(RuntimeError, match="an exception ended the update of step 5"):
            worker.bring_to(5, lambda: 0, LONG_S)


# numbers of steps


def test_the_first_finished_step_is_reported_once(worker: Worker) -> None:
    worker.loop.begin(4)
    assert worker.protected == []
    for step in (5, 6):
        worker.loop.step(step)
        assert worker.protected == [5]


def test_a_step_that_cannot_be_saved_yet_is_not_reported(worker: Worker) -> None:
    worker.trainee.updated_once = False
    worker.loop.begin(0)
    worker.loop.skip(1)
    assert worker.protected == []
    worker.loop.step(2)
    assert worker.protected == [2]


@pytest.mark.robustness("A1", "begin_step(step - 1)", "one line that names the step that was expected")
@pytest.mark.parametrize("first", [0, 4, 6])
def test_the_first_step_follows_the_state(worker: Worker, first: int) -> None:
    worker.session.require_next(first)  # nothing is protected yet
    worker.loop.begin(4)
    expected = rf"step {first} was begun, expected step 5: adaptor.protect was told step=4"
    with pytest.raises(StepError, match=expected):
        worker.session.require_next(first)
    worker.session.require_next(5)


@pytest.mark.robustness(
    "A1", "steps that go backwards or skip", "one line that names the step that was expected"
)
@pytest.mark.parametrize("step", [4, 5, 7])
def test_steps_follow_each_other(worker: Worker, step: int) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    with pytest.raises(StepError, match=rf"step {step} was begun, expected step 6"):
        worker.session.require_next(step)
    worker.session.require_next(6)


def test_a_step_that_was_left_without_an_update_can_be_begun_again(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.require_next(5)
    worker.session.require_next(6)  # or counts as done, like a step that the framework skips
    worker.loop.step(5)
    with pytest.raises(StepError):
        worker.session.require_next(5)


@pytest.mark.robustness(
    "A1",
    "the script moves the scheduler by another increment than samples_per_step",
    "one line as the next step begins; the step is saved as it was trained",
)
@pytest.mark.parametrize("skips", [False, True])
def test_a_scheduler_that_moves_by_another_increment(worker: Worker, skips: bool) -> None:
    """Only a step cut off by a fault is completed with samples_per_step: the error would be silent."""
    worker.loop.begin(4)
    worker.trainee.counts_samples = True
    protection = Protection(worker.session, 4)
    with protection.step(5):
        worker.loop.update(5)
    worker.trainee.samples += BATCH
    with protection.step(6):
        worker.loop.overflow() if skips else worker.loop.update(6)
    worker.trainee.samples += BATCH + 1
    with pytest.raises(StepError, match="25 samples, not 24"):
        protection.begin_step(7)
    assert worker.session.record_of(6).samples == 25


@pytest.mark.robustness(
    "A1", "two updates in one step", "one line, before the second; the step before is kept"
)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_second_update_in_a_step(optimizers: int) -> None:
    making = make(optimizers)
    worker = next(making)
    worker.loop.begin(4)
    worker.loop.step(5)
    with pytest.raises(StepError, match=r"step 5 has a second update .* expected step 6 to be begun"):
        worker.loop.update(5)
    assert worker.session.board.record().provides(5)
    worker.loop.step(6)


# hangs


def test_a_step_without_an_end_ends_with_its_update(worker: Worker) -> None:
    worker.loop.begin(4)
    for step in (5, 6, 7):
        worker.session.begin_step(step, ends_with_update=True)
        assert (worker.board.inside, worker.board.slowest) == (step, 0.0)
        worker.loop.update(step)
        assert worker.board.inside == -1
    assert worker.board.slowest > 0


def test_an_optimizer_that_tells_no_end_is_not_watched(worker: Worker) -> None:
    worker.loop.begin(4)
    for step in (5, 6, 7):
        worker.session.begin_step(step, ends_with_update=True)
        assert worker.board.inside == (5 if step == 5 else -1)
        worker.session.before_update(worker.loop.inner[0])
        worker.session.after_update(worker.loop.inner[0])


def test_a_phase_has_a_measure_once_one_of_its_name_has_ended(worker: Worker) -> None:
    with worker.session.phase("evaluation"):
        assert worker.board.turns == 0, "nothing is protected yet"
    worker.loop.begin(4)
    at_barrier: dict[str, list[float]] = {"evaluation": [], "save": []}
    for _ in range(2):
        for name in at_barrier:
            with worker.session.phase(name):
                at_barrier[name].append(worker.board.usual)
            assert worker.board.usual == -1
    for first, second in at_barrier.values():
        assert first == 0
        assert second > 0
    assert worker.board.turns == 8


def test_phases_in_each_other_and_after_the_loop(worker: Worker) -> None:
    worker.loop.begin(4)
    with worker.session.phase("save"):
        pass
    with worker.session.phase("evaluation"):
        with worker.session.phase("save"):
            assert worker.board.usual > 0
        assert worker.board.usual == 0
    with pytest.raises(KeyError), worker.session.phase("save"):
        raise KeyError
    assert worker.board.usual == -1
    worker.session.end_training()
    with worker.session.phase("save"):
        assert worker.board.usual == 0
    worker.loop.begin(4)
    with worker.session.phase("save"):
        assert worker.board.usual > 0, "it trains again"


def test_steps_of_a_function_where_nothing_is_recovered_online(worker: Worker) -> None:
    worker.loop.begin(4)
    steps: list[tuple[int, int]] = []
    Protection(worker.session, 4).run_steps(lambda step: steps.append((step, worker.board.inside)), 6)
    Protection(None, 4).run_steps(lambda step: steps.append((step, worker.board.inside)), 5)
    assert steps == [(5, 5), (6, 6), (5, -1)]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_function_of_a_step_ends_the_loop(worker: Worker, is_enabled: bool) -> None:
    worker.loop.begin(4)
    steps = list[int]()
    protection = Protection(worker.session if is_enabled else None, 4)
    protection.run_steps(lambda step: steps.append(step) or step != 6, 9)
    assert steps == [5, 6]
    assert worker.board.inside == -1, "the last step has ended"


@pytest.mark.robustness("A1", "run_steps is called twice", "one line that says why it is called once")
@pytest.mark.parametrize("is_enabled", [True, False])
def test_steps_are_made_in_one_call(worker: Worker, is_enabled: bool) -> None:
    worker.loop.begin(4)
    protection = Protection(worker.session if is_enabled else None, 4)
    protection.run_steps(lambda step: None, 5)
    with pytest.raises(StepError, match=r"protection\.run_steps was called a second time: .* in one call"):
        protection.run_steps(lambda step: None, 6)


@pytest.mark.robustness(
    "A1", "an exception leaves a step, and the script catches it", "the step is left: no hang is said later"
)
@pytest.mark.parametrize("error", [StopIteration, KeyError, KeyboardInterrupt])
def test_a_step_that_an_exception_leaves_runs_no_longer(worker: Worker, error: type[BaseException]) -> None:
    worker.loop.begin(4)
    protection = Protection(worker.session)
    with pytest.raises(error), protection.step(5):
        raise error
    assert worker.board.inside == -1
    with protection.step(5):
        assert worker.board.inside == 5
    assert worker.board.slowest == 0, "what was left in the middle is no measure"


def test_the_training_is_over_at_the_end_of_its_loop(worker: Worker) -> None:
    assert not worker.session.is_training
    worker.loop.begin(4)
    assert worker.session.is_training
    worker.loop.step(5)
    worker.session.end_training()
    assert not worker.session.is_training


@pytest.mark.robustness(
    "A2",
    "a loop is left by break in a step without an end",
    "end_step leaves the step: no hang is said later",
)
def test_a_step_without_an_end_can_be_left(worker: Worker) -> None:
    protection = Protection(worker.session)
    protection.end_step()  # nothing is protected yet
    worker.loop.begin(4)
    protection.begin_step(5)
    assert worker.board.inside == 5
    protection.end_step()
    protection.end_step()
    assert (worker.board.inside, worker.board.finished) == (-1, 4)
    protection.begin_step(5)
    worker.loop.update(5)
    protection.end_step()  # the update has ended the step
    assert (worker.board.inside, worker.board.finished) == (-1, 5)


@pytest.mark.parametrize("leave", ["with", "begin_step"])
def test_a_step_that_is_left_without_an_update_is_no_measure(worker: Worker, leave: str) -> None:
    """Neither this step nor the first two steps of a process are measured."""
    protection = Protection(worker.session)
    worker.loop.begin(4)
    for step in (5, 5, 5, 5):
        if leave == "with":
            for _ in range(2):
                with protection.step(step):
                    break
        else:
            protection.begin_step(step)
            protection.end_step()
        assert (worker.board.inside, worker.board.slowest) == (-1, 0.0)


@pytest.mark.robustness(
    "A1",
    "a training loop of one's own counts each part of a batch as a step, and updates after the last part",
    "protected from the first update on; the step of the last update is saved, no gradients are lost",
)
@pytest.mark.parametrize("begin", ["step", "begin_step"])
def test_steps_that_only_accumulate_gradients_are_not_finished(worker: Worker, begin: str) -> None:
    protection = Protection(worker.session)
    worker.loop.begin(0)
    for step in range(1, 12):
        with protection.step(step) if begin == "step" else contextlib.nullcontext():
            if begin == "begin_step":
                protection.begin_step(step)
            if step % 4 == 0:
                worker.loop.update(step)
        worker.trainee.samples += BATCH
        assert worker.protected == ([4] if step >= 4 else [])
        assert worker.board.finished == step - step % 4
        assert worker.session.record_of(step - step % 4) == record(step - step % 4)
    assert worker.gives == [8]
    protection.begin_step(12)
    worker.session.before_update(worker.loop.inner[0])
    assert worker.session.record_of(12) == record(12)


@pytest.mark.robustness(
    "A1", "the first steps of a job are evaluation only", "no step is said to be protected before an update"
)
def test_steps_of_evaluation_are_not_finished(worker: Worker) -> None:
    protection = Protection(worker.session)
    worker.loop.begin(0)
    for step in range(1, 2000):
        with protection.step(step):
            pass
    assert (worker.board.finished, worker.protected) == (0, [])
    assert worker.session.record_of(0) == record(0)
    with pytest.raises(LookupError):
        worker.session.record_of(1997)
    with protection.step(2000):
        worker.loop.update(2000)
    protection.begin_step(2001)
    assert worker.protected == [2000]


@pytest.mark.robustness(
    "A1",
    "fp16: the first steps are skipped, the loss scale is too large",
    "protected from the first step with an update: there is nothing to save before",
)
@pytest.mark.parametrize("own_loop", [True, False], ids=["a loop of one's own", "the framework's"])
def test_the_line_after_steps_that_were_skipped_at_the_start(worker: Worker, own_loop: bool) -> None:
    protection = Protection(worker.session)
    worker.trainee.updated_once = False
    worker.loop.begin(0)
    for step in (1, 2, 3):
        with protection.step(step) if own_loop else worker.session.step(step):
            worker.loop.overflow()
        worker.trainee.samples += BATCH
        assert (worker.board.finished, worker.protected, worker.gives) == (0, [], [0])
    with protection.step(4) if own_loop else worker.session.step(4):
        worker.loop.update(4)
        assert worker.protected == [4]
    with protection.step(5) if own_loop else worker.session.step(5):
        worker.loop.overflow()
    assert worker.protected == [4]
    assert worker.gives == [4, 5]


def test_skipped_steps_of_a_job_that_was_loaded_can_be_saved(worker: Worker) -> None:
    worker.loop.begin(7)
    with Protection(worker.session).step(8):
        worker.loop.overflow()
    assert (worker.protected, worker.gives) == ([8], [7, 8])


@pytest.mark.robustness(
    "A1",
    "an exception leaves an optimizer in the middle of its update, the script catches it and goes on",
    "nothing is saved of that state; the next update is protected again",
)
@pytest.mark.parametrize("begin", ["step", "begin_step"])
def test_an_update_that_an_exception_leaves_is_over(chain_of_two: Worker, begin: str) -> None:
    worker, (first, _) = chain_of_two, chain_of_two.loop.inner
    protection = Protection(worker.session)
    worker.loop.begin(4)

    def update_raises() -> None:
        if begin == "begin_step":
            protection.begin_step(5)
        worker.session.before_update(first)
        worker.session.after_update(first)
        raise FloatingPointError

    step = protection.step(5) if begin == "step" else contextlib.nullcontext()
    with pytest.raises(FloatingPointError), step:
        update_raises()
    if begin == "begin_step":
        protection.begin_step(5)
    assert worker.gives == []
    with protection.step(5):
        assert worker.board.inside == 5
        worker.loop.update(5)
    board = worker.frozen()
    assert [step for step in range(10) if board.provides(step)] == [5]


@pytest.mark.robustness(
    "A1",
    "adaptor.protect is called again, in the middle of a step",
    "training goes on from what it was given; nothing is left of the step",
)
def test_training_begins_again_in_the_middle_of_a_step(worker: Worker) -> None:
    protection = Protection(worker.session)
    worker.loop.begin(8)
    protection.begin_step(9)
    worker.session.before_update(worker.loop.inner[0])
    worker.loop.begin(2)
    board = worker.frozen()
    assert (board.phase_name, board.finished, board.ahead, board.inside) == ("RUNNING", 2, 2, -1)
    worker.session.door.let_through(3)
    with pytest.raises(
        StepError, match=r"step 9 was begun, expected step 3: adaptor.protect was told step=2"
    ):
        protection.begin_step(9)
    with protection.step(3):
        worker.loop.update(3)
    assert worker.reports == [(worker.trainee, 8), (worker.trainee, 2)]
    assert worker.stands == ("RUNNING", 3, 3)


@pytest.mark.robustness(
    "A2",
    "a thread of the script saves beside the training, in a phase of its own",
    "a hang of the training is noticed as ever",
)
def test_phases_of_other_threads_say_nothing_of_the_training(worker: Worker) -> None:
    protection = Protection(worker.session)
    worker.loop.begin(4)
    with protection.step(5):
        saving, go_on = threading.Event(), threading.Event()

        def save() -> None:
            with protection.phase("save"):
                saving.set()
                assert go_on.wait(LONG_S)

        with Thread(save) as thread:
            assert saving.wait(LONG_S)
            assert (worker.board.inside, worker.board.usual) == (5, -1.0)
            with protection.phase("evaluation"):
                go_on.set()
                thread.result()
                assert worker.board.usual == 0
        assert (worker.board.inside, worker.board.usual, worker.board.turns) == (5, -1.0, 2)


def test_a_loop_may_run_in_a_thread_of_its_own(worker: Worker) -> None:
    protection = Protection(worker.session)
    worker.loop.begin(4)

    def train() -> float:
        with protection.step(5), protection.phase("evaluation"):
            return worker.board.usual

    with Thread(train) as thread:
        assert thread.result() == 0


@pytest.mark.robustness("A1", "a step has no number", "one line that names it, not a traceback")
@pytest.mark.parametrize("step", [5.0, "5", None, -5, [5]])
def test_an_invalid_step_number_is_refused(worker: Worker, step: object) -> None:
    worker.loop.begin(4)
    protection = Protection(worker.session)
    with pytest.raises(StepError, match="must be a whole number, 0 or more"):
        protection.begin_step(step)  # type: ignore[arg-type]
    with pytest.raises(StepError, match="must be a whole number"), protection.step(step):  # type: ignore[arg-type]
        pass
    with protection.step(torch.tensor(5)):  # type: ignore[arg-type]
        assert worker.board.inside == 5


@pytest.mark.robustness(
    "A1", "an optimizer under torch.compile", "each of its updates is known, as without the compiler"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch's compiler
def test_updates_of_a_compiled_optimizer(worker: Worker) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight])
    optimizer.register_step_pre_hook(
        lambda optimizer_called, *_: worker.session.before_update(optimizer_called)
    )
    optimizer.register_step_post_hook(
        lambda optimizer_called, *_: worker.session.after_update(optimizer_called)
    )
    at_barrier = []
    worker.trainee.barrier = lambda: at_barrier.append(worker.stands)
    worker.session.begin_training(worker.trainee, [optimizer], 0)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(1, 13):
        with Protection(worker.session).step(number):
            weight.grad = torch.ones(2)
            step()
            assert worker.stands == ("RUNNING", number, number)
    assert at_barrier == [("READY", number, number) for number in range(12)]
    worker.frozen()
    with Protection(worker.session).step(13), Thread(step) as main:
        wait_for_waiter(worker.changed)
        assert main.running
        weight_before = weight.detach().clone()
        worker.session.door.let_through(13)
        main.result()
    assert not torch.equal(weight_before, weight)


@pytest.mark.robustness(
    "A1", "one of two optimizers makes its update in every second step only", "one line that says so"
)
def test_an_optimizer_that_makes_no_update_in_a_step(chain_of_two: Worker) -> None:
    worker, (first, _) = chain_of_two, chain_of_two.loop.inner
    worker.loop.begin(4)

    def train() -> None:
        with Protection(worker.session).step(5):
            worker.session.before_update(first)
            worker.session.after_update(first)

    with pytest.raises(StepError, match=r"step 5 has ended, and 1 of 2 optimizers .* made no update in it"):
        train()
    assert worker.board.inside == -1
    assert not any(worker.frozen().provides(step) for step in range(10)), "it is of no step"


@pytest.mark.robustness(
    "A2", "the last evaluation of a loop of one's own takes longer than those in it", "no hang is said"
)
def test_the_loop_of_a_library_ends(worker: Worker) -> None:
    protection = Protection(worker.session)
    protection.end_training()  # nothing is protected yet
    worker.loop.begin(4)
    with protection.phase("evaluation"):
        pass
    protection.begin_step(5)
    protection.end_training()
    assert (worker.board.inside, worker.session.is_training) == (-1, False)
    with protection.phase("evaluation"):
        assert worker.board.usual == 0, "it may take any time"


class Looping:
    """A user's loop that calls `begin_step`, and stops at the place `stands`."""

    def __init__(self, worker: Worker, stands: str) -> None:
        self.worker = worker
        self.protection = Protection(worker.session)
        self._stands = stands
        self.there, self.go_on = threading.Event(), threading.Event()

    def passes(self, place: str) -> None:
        if place == self._stands:
            self.there.set()
            assert self.go_on.wait(LONG_S)

    def update(self, step: int) -> None:
        self.worker.loop.update(step)

    def epoch(self, steps: range, leave: str = "") -> None:
        for step in steps:
            self.protection.begin_step(step)
            self.passes(f"data {step}")
            if step == 9 and leave == "break":
                break
            if step == 9 and leave == "return":
                return
            self.passes(f"forward {step}")
            self.update(step)
        self.passes(f"after step {step}")

    def train(self, leave: str = "") -> None:
        self.epoch(range(5, 7))
        self.epoch(range(7, 10), leave)
        self.passes("after the epoch")

    @contextlib.contextmanager
    def stood_still(self, leave: str = "") -> Iterator[None]:
        with Thread(self.train, leave):
            try:
                assert self.there.wait(LONG_S)
                yield
            finally:
                self.go_on.set()


@pytest.mark.robustness(
    "A2",
    "a loop is left by break or return in a step without an end, and nobody says so",
    "the step is found to be left before a hang is said",
)
@pytest.mark.parametrize(
    ("leave", "stands"),
    [("break", "after step 9"), ("break", "after the epoch"), ("return", "after the epoch")],
)
def test_a_step_without_an_end_that_was_left(worker: Worker, leave: str, stands: str) -> None:
    worker.loop.begin(4)
    with Looping(worker, stands).stood_still(leave):
        assert (worker.board.inside, worker.board.finished) == (9, 8)
        assert worker.session.end_step_left_by_break()
        assert worker.board.inside == -1
        assert not worker.session.end_step_left_by_break(), "it is said once"


@pytest.mark.parametrize("stands", ["data 8", "forward 8", "data 5"])
def test_a_step_without_an_end_that_hangs(worker: Worker, stands: str) -> None:
    worker.loop.begin(4)
    with Looping(worker, stands).stood_still():
        assert not worker.session.end_step_left_by_break()
        assert worker.board.inside == int(stands[-1])


def test_a_loop_that_begins_its_steps_in_a_callback(worker: Worker) -> None:
    """The function that calls begin_step has returned: the common caller of both calls is the loop."""
    looping = Looping(worker, "forward 8")
    begin = looping.protection.begin_step

    class Callbacks:
        def begin_step(self, step: int) -> None:
            begin(step)

    looping.protection = Callbacks()  # type: ignore[assignment]
    worker.loop.begin(4)
    with looping.stood_still():
        assert not worker.session.end_step_left_by_break()
        assert worker.board.inside == 8


def test_a_rank_that_holds_outlives_a_handler_that_raises(worker: Worker) -> None:
    """torch's handler raises when a data loader is killed; this rank may hold the only copy."""
    main = threading.get_ident()
    handled = threading.Semaphore(0)

    class Left(BaseException):
        pass

    errors = iter([RuntimeError("a data loader was killed"), Left()])

    def raises(number: int, frame: object) -> None:
        handled.release()
        raise next(errors)

    def holds() -> bool:
        frame = top = sys._current_frames()[main]
        while frame.f_back is not None and frame.f_code is not Session.hold.__code__:
            frame = frame.f_back
        return frame.f_code is Session.hold.__code__ and top.f_code.co_name == "wait"

    def tell() -> None:
        for _ in range(2):
            waiting.until(holds, "the rank holds")
            signal.pthread_kill(main, signal.SIGUSR1)
            # A signal just before the main thread waits in C is handled when another signal wakes it.
            while not handled.acquire(timeout=0.1):
                signal.pthread_kill(main, signal.SIGUSR2)

    used = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    handlers = [(number, signal.getsignal(number)) for number in used]
    signal.signal(signal.SIGUSR1, raises)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.signal(signal.SIGCHLD, raises)
    try:
        with Thread(tell), pytest.raises(Left):
            worker.session.hold()
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
    finally:
        for number, handler in handlers:
            signal.signal(number, handler)
