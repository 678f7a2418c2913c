"""The session on a device that lags behind the main thread, hangs, or has failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from adaptor.devices.device import Device
from adaptor.protocol.messages import Phase
from adaptor.worker import abort_collectives
from adaptor.worker.abort_collectives import CollectiveEndedError
from tests.unit.test_session import Worker, make, record
from tests.unit.threads import LONG_S, Thread, wait_for_waiter

SHORT_S = 0.05


@dataclass
class Queue(Device):
    """A stream that completes the marks made before `standing` was set; marks are numbers."""

    marks: int = 0
    reached: int = 0
    standing: bool = False
    failure: str = ""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, end: Callable[[Callable[[], None]], None]) -> None:
        self.end = end

    def ends(self) -> bool:
        """End the hanging collective, if permitted; return whether it was ended."""
        calls: list[bool] = []
        self.end(lambda: calls.append(True))
        return bool(calls)

    def mark(self) -> Any:
        self.marks += 1
        if not self.standing:
            self.reached = self.marks
        return self.marks

    def done(self, mark: Any) -> bool:
        return mark is None or self.reached >= mark

    def wait(self, mark: Any, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.done(mark), timeout_s)

    def go_on(self) -> None:
        with self.changed:
            self.standing = False
            self.reached = self.marks
            self.changed.notify_all()

    def unreadable(self, release: bool = True) -> str:
        return self.failure


@pytest.fixture
def device() -> Queue:
    return Queue()


@pytest.fixture(autouse=True)
def interrupted(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record at each standstill of the main thread whether the thread may be interrupted."""
    permissions: list[bool] = []

    def stands_still(may: Callable[[], bool]) -> bool:
        permissions.append(may())
        return False

    monkeypatch.setattr(abort_collectives, "interrupt", stands_still)
    return permissions


@pytest.fixture
def worker(device: Queue) -> Iterator[Worker]:
    for with_device in make():
        with_device.trainee.device = device
        yield with_device


def test_a_freeze_is_answered_when_the_device_has_made_the_update(worker: Worker, device: Queue) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    device.standing = True
    worker.loop.update(5)
    assert worker.board.finished == 5
    assert worker.session.freezer.freeze(SHORT_S) is None
    with Thread(worker.session.freezer.freeze, LONG_S) as answer:
        device.go_on()
    board = answer.result()
    assert board is not None
    assert board.provides(5)


def test_a_rank_let_through_has_the_step_once_its_device_has(worker: Worker, device: Queue) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    device.standing = True
    worker.loop.update(5)
    with pytest.raises(TimeoutError, match="the update of step 5 was not done"):
        worker.bring_to(5, lambda: 0, SHORT_S)
    with Thread(worker.bring_to, 5, lambda: 0, LONG_S):
        device.go_on()


def test_a_collective_that_hangs_after_the_update_is_not_awaited(worker: Worker, device: Queue) -> None:
    """Parameters are gathered from a lost rank before the record of the step is taken."""
    worker.loop.begin(4)
    worker.loop.step(5)
    worker.loop.step(6)
    device.standing = True
    worker.session.begin_step(7)
    assert worker.frozen().provides(6)
    assert worker.session.record_of(6) == record(6)
    assert worker.trainee.derived == [6]


def test_a_complete_record_is_used_unchanged(worker: Worker) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    worker.session.begin_step(6)
    assert worker.session.record_of(5) == record(5)
    assert worker.trainee.derived == []


def test_a_skipped_step_is_derived_as_one_that_was_skipped(worker: Worker, device: Queue) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    worker.loop.skip(6)
    device.standing = True
    worker.session.begin_step(7)
    assert worker.session.record_of(6) == record(6, scale=1023.0)
    assert worker.trainee.derived == [6]


def test_the_first_record_is_waited_for(worker: Worker, device: Queue) -> None:
    device.standing = True
    worker.loop.begin(4)
    worker.session.begin_step(5)
    other_thread = threading.Thread(target=device.go_on)
    other_thread.start()
    assert worker.session.record_of(4) == record(4)
    other_thread.join()


def test_a_record_that_is_not_there_yet_is_not_read(
    worker: Worker, device: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values behind a collective that never ends have not been copied."""
    monkeypatch.setattr("adaptor.worker.update_window.RECORD_S", SHORT_S)
    device.standing = True
    worker.loop.begin(4)
    worker.session.begin_step(5)
    with pytest.raises(LookupError, match="step 4 is not among"):
        worker.session.record_of(4)


def test_a_rank_whose_device_cannot_be_read_holds_nothing(worker: Worker, device: Queue) -> None:
    worker.loop.begin(4)
    worker.loop.step(5)
    device.failure = "CUDA error: an illegal memory access was encountered"
    board = worker.frozen()
    assert board.phase is Phase.UNREADABLE
    assert board.error == device.failure
    assert not any(board.provides(step) for step in range(8))
    assert worker.gives == [5]  # the main thread may still write to the board


def test_steps_are_reported_before_the_device_has_to_answer(worker: Worker, device: Queue) -> None:
    """After an aborted collective the main thread continues with unreduced gradients."""
    worker.loop.begin(4)
    worker.session.begin_step(5)

    def abort(release: bool = True) -> str:
        assert device.ends()
        with pytest.raises(CollectiveEndedError):
            worker.loop.overflow()  # the framework's reaction to such gradients
        return ""

    device.unreadable = abort  # type: ignore[method-assign]
    first = worker.frozen()
    assert (first.phase, first.finished) == (Phase.RUNNING, 4)
    assert worker.board.finished == 4, "a dump that fails tells it, and the agent"
    device.unreadable = lambda release=True: ""  # type: ignore[method-assign]
    assert worker.frozen() == first, "another controller may ask again"
    assert worker.session.record_of(4) == record(4)


def test_a_rank_that_was_ready_goes_on_when_its_device_was_made_to_answer(
    worker: Worker, device: Queue, interrupted: list[bool]
) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.freezer.freeze(LONG_S)
    with Thread(worker.loop.update, 5):
        wait_for_waiter(worker.changed)
        assert device.ends()
        assert interrupted == [], "it is needed at the door"
        assert worker.frozen().phase is Phase.READY
        worker.bring_to(5, lambda: 0, LONG_S)
    assert worker.frozen().finished == 5
    worker.session.begin_step(6)
    assert device.ends()
    assert interrupted == [True], "now it may wait for parameters that are gathered"
    with pytest.raises(CollectiveEndedError):
        worker.loop.update(6)
    assert worker.frozen().finished == 5


def test_an_update_with_unreduced_gradients_does_not_reach_the_door(worker: Worker, device: Queue) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.freezer.freeze(LONG_S)
    assert device.ends()
    with pytest.raises(CollectiveEndedError):
        worker.loop.update(5)
    assert worker.stands == ("RUNNING", 4, 4)
    assert worker.gives == [4]
    with pytest.raises(CollectiveEndedError):  # a caller that catches the error and continues
        worker.session.begin_step(6)
    assert worker.gives == [4]


def test_no_collective_is_ended_while_an_update_is_in_flight(
    worker: Worker, device: Queue, interrupted: list[bool]
) -> None:
    """A host copy may be waiting; an exception in the update would leave the state between two steps."""
    worker.loop.begin(4)
    worker.session.begin_step(5)
    worker.session.freezer.freeze(LONG_S)
    aborted: list[bool] = []
    with Thread(worker.loop.update, 5):
        wait_for_waiter(worker.changed)
        worker.session.after_update = lambda optimizer: aborted.append(device.ends())  # type: ignore[method-assign]
        worker.session.door.let_through(5)
    assert aborted == [False]
    assert interrupted == []
    assert worker.stands == ("UPDATING", 5, 4)


def test_no_collective_is_ended_without_an_incident(worker: Worker, device: Queue) -> None:
    worker.loop.begin(4)
    worker.session.begin_step(5)
    assert not device.ends()
    worker.session.door.shut()  # as a broken barrier does, before the agent reports an incident
    assert not device.ends()


def test_a_late_abort_does_not_end_a_fresh_group(worker: Worker, device: Queue) -> None:
    """For example an abandoned dump's copy whose collective never ended."""
    freezer = worker.session.freezer
    worker.loop.begin(4)
    worker.session.begin_step(5)
    freezer.freeze(LONG_S)
    ending, may_end = threading.Event(), threading.Event()
    calls: list[str] = []

    def act() -> None:
        ending.set()
        assert may_end.wait(LONG_S)
        calls.append("ended")

    device.come_to_rest = lambda: calls.append("at rest")  # type: ignore[method-assign]
    with Thread(device.end, act):
        assert ending.wait(LONG_S)
        with Thread(freezer.rest):
            may_end.set()
    assert calls == ["ended", "at rest"]
    assert not device.ends()
    freezer.begin_attempt()
    assert device.ends(), "those of an attempt that has failed"
    freezer.rest()
    freezer.freeze(LONG_S, is_repeated=True)
    assert not device.ends()
    freezer.freeze(LONG_S)
    assert device.ends(), "of another incident"
