"""Limits for a step and a phase of a process without its own measurements."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from adaptor import context
from adaptor.controller.hang_detector import OVERLONG, PHASE_FACTOR, HangDetector, hang
from adaptor.protocol.board import USES, Board, BoardMemory
from adaptor.protocol.messages import NodeStalled
from adaptor.waits import Waits
from adaptor.worker import pace as pace_module
from adaptor.worker.pace import UNUSUAL, Pace

FLOOR_S = 10.0


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    test_clock = Clock()
    monkeypatch.setattr(pace_module, "time", test_clock)
    return test_clock


@pytest.fixture
def memory() -> Iterator[BoardMemory]:
    board_memory = BoardMemory([0, 1])
    yield board_memory
    board_memory.close()


def rank(memory: BoardMemory, number: int) -> tuple[Board, Pace]:
    board = Board(number, memory.path, memory.slots)
    board.start(0)
    return board, Pace(board)


def step(pace: Pace, clock: Clock, number: int, seconds: float) -> None:
    pace.begin_step(number)
    clock.now += seconds
    pace.end_step()


def test_a_wait_for_another_rank_is_no_computation(memory: BoardMemory, clock: Clock) -> None:
    _, pace = rank(memory, 1)

    def forward(seconds: float, waited: float) -> None:
        clock.now += seconds + waited
        context.part(Waits).seconds += waited

    for number in range(1, UNUSUAL + 4):
        pace.begin_step(number)
        for _ in range(2):
            pace.compute(lambda: forward(0.5, 3.0))
        clock.now += 4.0  # in the gradient reduction
        pace.end_step()
        assert memory.compute_times() == ({} if number <= UNUSUAL else {1: (1.0, 0.0)})
    memory.reset(1)
    assert memory.compute_times() == {}


def test_ranks_with_batches_of_other_lengths_compute_alike_for_each_token(
    memory: BoardMemory, clock: Clock
) -> None:
    def forward(shape: tuple[int, ...]) -> tuple[torch.Tensor, None]:
        clock.now += 0.5 * shape[0] * shape[1]
        return torch.empty(shape), None

    for number, shape in ((0, (4, 1, 8)), (1, (3, 4))):  # activations; losses of more tokens
        _, pace = rank(memory, number)
        for count in range(1, UNUSUAL + 3):
            pace.begin_step(count)
            for _ in range(2):
                pace.compute(lambda pace=pace, shape=shape: pace.counting_tokens(forward)(shape))
            pace.end_step()
    assert memory.compute_times() == {0: (4.0, 0.5), 1: (12.0, 0.5)}


def phase(pace: Pace, clock: Clock, seconds: float) -> None:
    pace.begin_phase("evaluation")
    clock.now += seconds
    pace.end_phase()


def noticed_after(memory: BoardMemory) -> float:
    """Return the seconds until a stalled rank is reported while the other rank waits."""
    watch = HangDetector(0, FLOOR_S)
    boards = [memory.read(0), memory.read(1)]
    for second in range(2000):
        report = watch.look(boards, float(second))
        if isinstance(report, NodeStalled) and hang([report]):
            return float(second)
    return float("inf")


def test_a_new_process_that_hangs_in_its_first_step_is_noticed_as_soon_as_any(
    memory: BoardMemory, clock: Clock
) -> None:
    _, twin = rank(memory, 0)
    for number, seconds in enumerate([20.0, 8.0, 1.0, 2.0], start=1):
        step(twin, clock, number, seconds)
    _, new = rank(memory, 1)
    new.begin_step(5)
    twin.begin_step(5)
    assert noticed_after(memory) == OVERLONG * FLOOR_S
    _, new = rank(memory, 1)
    new.take_over(twin.measures())
    new.begin_step(5)
    assert noticed_after(memory) == 60.0  # three times the first steps of the other rank
    for number in range(5, 5 + UNUSUAL):
        new.end_step()
        new.begin_step(number + 1)
    assert noticed_after(memory) == FLOOR_S


def test_a_new_process_that_hangs_in_an_evaluation_is_noticed(memory: BoardMemory, clock: Clock) -> None:
    """The process that provides the state has finished a phase of this kind."""
    _, twin = rank(memory, 0)
    for number in range(1, 4):
        step(twin, clock, number, 1.0)
    phase(twin, clock, 3.0)
    _, new = rank(memory, 1)
    new.begin_phase("evaluation")
    twin.begin_phase("evaluation")
    assert noticed_after(memory) == float("inf")
    _, new = rank(memory, 1)
    new.take_over(twin.measures())
    new.begin_phase("evaluation")
    assert noticed_after(memory) == PHASE_FACTOR * FLOOR_S


def test_the_first_phase_of_a_kind_with_a_known_duration_has_a_limit(
    memory: BoardMemory, clock: Clock
) -> None:
    for number in range(2):
        _, pace = rank(memory, number)
        for finished_step in range(1, 4):
            step(pace, clock, finished_step, 1.0)
        pace.begin_phase("go_back", usual_s=0.001)
    assert noticed_after(memory) == PHASE_FACTOR * FLOOR_S


def test_missing_measurements_are_not_passed_on(memory: BoardMemory, clock: Clock) -> None:
    """A process after its first step has not measured the second, which may compile more."""
    _, twin = rank(memory, 0)
    step(twin, clock, 1, 1.0)
    board, new = rank(memory, 1)
    new.take_over(twin.measures())
    assert board.slowest == 0.0


def test_measurements_are_passed_on_again(memory: BoardMemory, clock: Clock) -> None:
    _, twin = rank(memory, 0)
    for number, seconds in enumerate([20.0, 8.0, 1.0], start=1):
        step(twin, clock, number, seconds)
    _, new = rank(memory, 1)
    new.take_over(twin.measures())
    assert new.measures() == twin.measures()


def test_a_phase_that_an_exception_has_left_is_no_measure(memory: BoardMemory, clock: Clock) -> None:
    board, pace = rank(memory, 0)
    phase(pace, clock, 3.0)
    pace.begin_phase("evaluation")
    clock.now += 1000.0
    pace.end_phase(is_measure=False)
    pace.begin_phase("evaluation")
    assert board.usual == 3.0


def test_each_second_of_a_phase_is_reported_once(memory: BoardMemory, clock: Clock) -> None:
    """The lowest rank reports its work besides steps; a nested phase counts only for itself."""
    _, pace = rank(memory, 0)
    _, other_pace = rank(memory, 1)
    phase(other_pace, clock, 1000.0)
    pace.begin_phase("evaluation")
    clock.now += 1.0
    pace.begin_phase("save")
    clock.now += 2.0
    pace.end_phase()
    clock.now += 4.0
    pace.end_phase()
    pace.begin_phase("a name of the script's own")
    clock.now += 8.0
    pace.end_phase()
    with pace.loading():
        clock.now += 16.0
    assert dict(zip(USES, memory.spent(), strict=True)) == {
        "steps": 0.0,
        "data": 0.0,
        "evaluation": 5.0,
        "save": 2.0,
        "load": 16.0,
        "other": 8.0,
    }


def test_a_phase_cut_off_by_a_fault_is_not_reported(memory: BoardMemory, clock: Clock) -> None:
    """The phase waited for a lost rank: its time belongs to the incident."""
    _, pace = rank(memory, 0)
    pace.begin_phase("evaluation")
    clock.now += 60.0
    pace.end_phase(is_measure=False)
    assert sum(memory.spent()) == 0.0


def test_waits_for_data_are_reported_outside_of_phases(memory: BoardMemory, clock: Clock) -> None:
    """In an evaluation the wait for data counts as evaluation."""

    def read() -> str:
        clock.now += 3.0
        return "a batch"

    _, pace = rank(memory, 0)
    assert pace.wait_for_data(read) == "a batch"
    pace.begin_phase("evaluation")
    assert pace.wait_for_data(read) == "a batch"
    pace.end_phase()
    spent = dict(zip(USES, memory.spent(), strict=True))
    assert (spent["data"], spent["evaluation"]) == (3.0, 3.0)


def test_reported_step_times_exclude_other_reported_times(memory: BoardMemory, clock: Clock) -> None:
    """An unfinished step is not reported."""

    def read() -> None:
        clock.now += 3.0

    _, pace = rank(memory, 0)
    pace.wait_for_data(read)
    pace.begin_step(1)
    clock.now += 1.0
    pace.wait_for_data(read)
    phase(pace, clock, 5.0)
    clock.now += 1.0
    pace.end_step()
    pace.begin_step(2)
    clock.now += 7.0
    pace.abandon_step()
    spent = dict(zip(USES, memory.spent(), strict=True))
    assert (spent["steps"], spent["data"], sum(spent.values())) == (2.0, 6.0, 13.0)


def test_a_new_process_starts_its_report_at_zero(memory: BoardMemory, clock: Clock) -> None:
    _, pace = rank(memory, 0)
    phase(pace, clock, 5.0)
    memory.reset(0)
    assert sum(memory.spent()) == 0.0
