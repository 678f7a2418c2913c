"""A hang is a step that does not end, never the time before the first steps or between two steps."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptor.controller.hang_detector import ABSENT_S, AGAIN, FACTOR, OVERLONG, HangDetector, hang
from adaptor.protocol.messages import CALL, BoardRecord, NodeResumed, NodeStalled, Phase, Standing
from adaptor.worker import stacks
from tests import waiting
from tests.unit.threads import LONG_S, Thread

IN_A_STEP = BoardRecord(0, 1, Phase.RUNNING, 4, 4, 4, inside=5, slowest=1.0)
OTHER = msgspec.structs.replace(IN_A_STEP, rank=1)


def _changed(**fields: Any) -> BoardRecord:
    return msgspec.structs.replace(OTHER, **fields)


def _still_for(
    watch: HangDetector, seconds: int, boards: list[BoardRecord], start: int = 0, traced: bool = False
) -> list[NodeStalled | NodeResumed]:
    """Look every second; return the reports."""
    looks = (watch.look(boards, float(second), traced=traced) for second in range(start, start + seconds + 1))
    return [report for report in looks if report is not None]


def test_a_step_that_does_not_end_is_a_hang() -> None:
    watch = HangDetector(2, 10.0)
    assert not _still_for(watch, 9, [IN_A_STEP, OTHER])
    report = watch.look([IN_A_STEP, OTHER], 10.0)
    assert report == NodeStalled(2, 10.0, 5, -1)
    assert hang([report])


def test_a_hang_is_reported_again_later_and_at_its_end() -> None:
    watch = HangDetector(2, 32.0)
    report = _still_for(watch, 40, [IN_A_STEP, OTHER])
    assert report == [NodeStalled(2, seconds, 5, -1) for seconds in (32.0, 32.0 * (1 + AGAIN), 37.0, 40.0)]
    assert watch.look([IN_A_STEP, _changed(inside=6)], 41.0) == NodeResumed(2)
    assert watch.look([IN_A_STEP, _changed(inside=6)], 42.0) is None


def test_a_job_with_slow_steps_has_more_time() -> None:
    watch = HangDetector(0, 10.0)
    boards = [IN_A_STEP, _changed(slowest=20.0)]
    assert not _still_for(watch, int(20 * FACTOR) - 1, boards)
    assert watch.look(boards, 20 * FACTOR) == NodeStalled(0, 20 * FACTOR, 5, -1)


def test_kernels_that_end_by_themselves_shorten_the_time() -> None:
    """A limit for a step below a third of the kernel time stays unchanged."""
    watch = HangDetector(0, 120.0)
    boards = [IN_A_STEP, _changed(kernel_timeout=100.0)]
    assert not _still_for(watch, 74, [*boards, IN_A_STEP])
    assert not _still_for(HangDetector(0, 120.0), 119, [IN_A_STEP, OTHER])
    assert HangDetector(0, 60.0)._step_may_take(boards[1]) == 60.0
    assert HangDetector(0, 120.0)._step_may_take(_changed(kernel_timeout=100.0, slowest=30.0)) == 90.0
    all_time_out = [msgspec.structs.replace(board, kernel_timeout=100.0) for board in boards]
    watch = HangDetector(0, 120.0)
    assert not _still_for(watch, 74, all_time_out)
    assert watch.look(all_time_out, 75.0) == NodeStalled(0, 75.0, 5, -1)


@pytest.mark.parametrize(
    "change",
    [{"phase": Phase.READY}, {"finished": 5}, {"inside": 6}, {"progress": 1}, {"ahead": 5}],
    ids=lambda change: next(iter(change)),
)
def test_one_moving_rank_is_no_hang(change: dict[str, Any]) -> None:
    watch = HangDetector(0, 10.0)
    _still_for(watch, 9, [IN_A_STEP, OTHER])
    assert not _still_for(watch, 9, [IN_A_STEP, _changed(**change)], start=10)


def test_places_without_a_limit() -> None:
    assert not _still_for(HangDetector(0, 10.0), 1000, [IN_A_STEP, _changed(phase=Phase.STARTING)])


@pytest.mark.robustness(
    "A2", "a collective hangs in one of the first steps", "a hang, after fifteen times TTP_HANG"
)
def test_the_first_steps_of_a_process_have_more_time() -> None:
    first = [msgspec.structs.replace(board, slowest=0.0) for board in (IN_A_STEP, OTHER)]
    for boards in (first, [IN_A_STEP, first[1]]):
        watch = HangDetector(0, 10.0)
        assert not _still_for(watch, int(OVERLONG * 10) - 1, boards)
        report = watch.look(boards, OVERLONG * 10)
        assert isinstance(report, NodeStalled)
        assert hang([report])
    nobody_has_begun = [msgspec.structs.replace(board, inside=-1) for board in first]
    assert not hang([_last(HangDetector(0, 10.0), 1000, nobody_has_begun)])


BETWEEN = _changed(inside=-1)  # between steps 4 and 5


@pytest.mark.parametrize(
    ("boards", "hangs"),
    [
        ([IN_A_STEP, OTHER], True),
        ([IN_A_STEP, BETWEEN], False),
        ([BETWEEN], False),
        ([msgspec.structs.replace(IN_A_STEP, inside=4), BETWEEN], True),
        ([msgspec.structs.replace(IN_A_STEP, finished=3, inside=4, phase=Phase.UPDATING), BETWEEN], True),
        ([IN_A_STEP, _changed(phase=Phase.ENDED)], True),
        ([_changed(phase=Phase.ENDED)], False),
        ([], False),
    ],
    ids=[
        "all in a step",
        "one that others wait for saves",
        "all evaluate",
        "one is at the end of the step that others have left",
        "one is in the update of the step that others have left",
        "one has ended in the middle",
        "all have ended",
        "all are gone",
    ],
)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_between_steps_waits_or_is_awaited(boards: list[BoardRecord], hangs: bool, nodes: int) -> None:
    apart = [boards] if nodes == 1 else [*([board] for board in boards), []]
    report = [
        _still_for(HangDetector(node, 10.0), 10, boards_of_node)[-1]
        for node, boards_of_node in enumerate(apart)
    ]
    assert hang(stalled for stalled in report if isinstance(stalled, NodeStalled)) is hangs


def _in_a_phase(rank: int, usual: float, **fields: Any) -> BoardRecord:
    """Return a board between steps 4 and 5, or as `fields` say."""
    fields_in_phase = {"rank": rank, "inside": -1, "usual": usual, "turns": 1, **fields}
    return msgspec.structs.replace(IN_A_STEP, **fields_in_phase)


def _last(watch: HangDetector, seconds: int, boards: list[BoardRecord]) -> NodeStalled:
    report = _still_for(watch, seconds, boards)[-1]
    assert isinstance(report, NodeStalled)
    return report


@pytest.mark.robustness(
    "A2", "a rank hangs in an evaluation or a save, others wait in the next step", "a hang, by its own limit"
)
@pytest.mark.parametrize(
    ("usual", "limit"), [(1.0, 5 * 10), (20.0, 5 * 20)], ids=["the floor", "what is usual"]
)
@pytest.mark.parametrize("others_are", ["in the next step", "in the phase, too"])
def test_a_phase_that_takes_too_long(usual: float, limit: int, others_are: str) -> None:
    other_board = IN_A_STEP if others_are == "in the next step" else _in_a_phase(0, usual)
    boards = [other_board, _in_a_phase(1, usual)]
    watch = HangDetector(0, 10.0)
    assert not hang([_last(watch, limit - 1, boards)])
    report = watch.look(boards, float(limit))
    assert report == NodeStalled(0, float(limit), 5, -1)
    assert hang([report])


def test_the_first_of_a_kind_may_take_any_time_that_nobody_waits() -> None:
    boards = [_in_a_phase(0, 0.0), _in_a_phase(1, 0.0)]
    assert not hang([_last(HangDetector(0, 10.0), 100_000, boards)])


def test_a_first_phase_may_take_any_time_that_others_wait() -> None:
    """A first save of 40 minutes: a restart would come to the same save."""
    boards = [IN_A_STEP, _in_a_phase(1, 0.0)]
    report = _last(HangDetector(0, 10.0), 100_000, boards)
    assert not report.overlong
    assert not hang([report])


def test_a_rank_awaited_beyond_torch_s_timeout_hangs() -> None:
    """Outside of phases: waiting longer would be worse than torchrun."""
    boards = [IN_A_STEP, _in_a_phase(1, -1.0)]
    watch = HangDetector(0, 10.0)
    assert not hang([_last(watch, int(OVERLONG * 10) - 1, boards)])
    report = watch.look(boards, OVERLONG * 10)
    assert report == NodeStalled(0, OVERLONG * 10, 5, 4, overlong=True)
    assert hang([report])
    one_that_has_not_waited_so_long = msgspec.structs.replace(report, node=1, overlong=False)
    assert not hang([report, one_that_has_not_waited_so_long])


def test_a_phase_inside_a_step_is_waited_for_by_the_others_in_the_step() -> None:
    boards = [IN_A_STEP, _in_a_phase(1, 1.0, inside=5, finished=5)]
    watch = HangDetector(0, 10.0)
    assert not hang([_last(watch, 49, boards)]), "it has its own limit, though the step's is over"
    assert watch.look(boards, 50.0) == NodeStalled(0, 50.0, 5, -1)


def test_beginning_or_ending_a_phase_is_progress() -> None:
    watch = HangDetector(0, 10.0)
    _still_for(watch, 9, [IN_A_STEP, _in_a_phase(1, 1.0)])
    assert not _still_for(watch, 9, [IN_A_STEP, _in_a_phase(1, 1.0, turns=2)], start=10)


def test_the_detector_can_be_switched_off() -> None:
    assert not _still_for(HangDetector(0, 0.0), 100_000, [IN_A_STEP])


def test_a_debugger_takes_its_time() -> None:
    watch = HangDetector(0, 10.0)
    assert not _still_for(watch, 100, [IN_A_STEP], traced=True)
    assert not _still_for(watch, 8, [IN_A_STEP], start=101)
    assert watch.look([IN_A_STEP], 110.0) is not None


def test_a_watch_that_was_stopped_itself_starts_anew() -> None:
    """For example when the whole job is suspended and resumed."""
    watch = HangDetector(0, 30.0)
    _still_for(watch, 20, [IN_A_STEP])
    assert watch.look([IN_A_STEP], 20.5 + ABSENT_S + 1000) is None


def _standing_in(act: Callable[[threading.Event], Any], path: Path) -> Standing:
    """Return the report on this thread while `act` waits for the event."""
    written, release = threading.Event(), threading.Event()

    def ask() -> Standing | None:
        waiting.until(lambda: "waiter.acquire(True, timeout)" in _line(), "the main thread waits")
        try:
            return stacks.look(path, LONG_S, written.set)
        finally:
            release.set()

    with Thread(ask) as thread:
        act(release)
        standing = thread.result()
    assert standing is not None
    assert written.is_set()
    return standing


def _line() -> str:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno)


def test_a_lock_is_no_collective(tmp_path: Path) -> None:
    path = tmp_path / "stacks" / "rank0.txt"
    standing = _standing_in(lambda release: release.wait(LONG_S), path)
    assert not standing.waits
    assert standing.where.startswith("wait (threading.py:")
    assert " in test_a_lock_is_no_collective\n" in path.read_text()


def test_the_main_thread_is_the_first_of_however_many(tmp_path: Path) -> None:
    path = tmp_path / "rank0.txt"
    go = threading.Event()
    threads = [threading.Thread(target=go.wait, name=f"one of many {number}") for number in range(150)]
    for thread in threads:
        thread.start()
    _standing_in(lambda release: release.wait(LONG_S), path)
    go.set()
    for thread in threads:
        thread.join()
    stacks_of = path.read_text().split("\n\n")
    assert "[MainThread]" in stacks_of[0]
    assert " in test_the_main_thread_is_the_first_of_however_many\n" in stacks_of[0]
    assert sum("[one of many " in stack for stack in stacks_of) == 150


def test_stack_hashes_agree_up_to_the_differing_frame(tmp_path: Path) -> None:
    """The stack hashes agree from the outermost call to the frame where two stacks differ."""

    def stand(release: threading.Event, in_another_place: bool) -> None:
        if in_another_place:
            release.wait(LONG_S)
        else:
            release.wait(LONG_S)

    ways = [
        _standing_in(lambda release, place=place: stand(release, place), tmp_path / str(number)).stack_hashes  # type: ignore[misc]
        for number, place in enumerate((False, False, True))
    ]
    calls = [[way[start : start + CALL] for start in range(0, len(way), CALL)] for way in ways]
    assert calls[0] == calls[1]
    assert len(calls[0]) == len(calls[2]) > 10
    differing = [
        place for place, pair in enumerate(zip(calls[0], calls[2], strict=True)) if pair[0] != pair[1]
    ]
    assert differing == [len(calls[0]) - 3], "`stand`, which calls Event.wait, which calls Condition.wait"


def test_a_folder_that_cannot_be_written_costs_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (
        stacks.look(tmp_path / "file" / "rank0.txt", LONG_S, lambda: pytest.fail("it is not there"))
        is not None
    )


@pytest.mark.parametrize(
    ("line", "is_wait"),
    [
        ("self.grad_reduce_handle.wait()", True),
        ("torch.cuda.synchronize()", True),
        ("grad_norm = total_norm.item()", True),
        ("torch.distributed.all_reduce(tensor, group=group)", True),
        ("self._cond.wait(timeout)", False),
        ("waiter.acquire()", False),
        ("data = self._data_queue.get(timeout=timeout)", False),
    ],
)
def test_a_collective_is_known_by_its_call(line: str, is_wait: bool) -> None:
    assert bool(stacks._WAITS.search(line)) is is_wait
