"""Replayed micro-batches: the ranks named for wrong gradients, and the stop of a job to repeat them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from adaptor import context
from adaptor.frameworks import state_comparison
from adaptor.verification import replay_check
from adaptor.verification.replay_check import SELF_TEST, ReplayCheck, ReplayRecord, decide

# Per replica of one rank: own sum, sum of the repeated micro-batch, own sum the second time.
Sums = tuple[str, str, str]


def _ring(*sums: Sums, ranks: int = 1) -> tuple[list[ReplayRecord], list[str]]:
    """Return replicas of `ranks` consecutive ranks; each replica is repeated by the next one."""
    count = len(sums) * ranks
    records = [
        ReplayRecord(rank // ranks, (rank + ranks) % count, sums[rank // ranks][0], sums[rank // ranks][1])
        for rank in range(count)
    ]
    return records, [sums[rank // ranks][2] for rank in range(count)]


@pytest.mark.parametrize(
    ("sums", "named", "suspects"),
    [
        # Rank 0 was wrong once, and right in its own repetition.
        ([("x", "b", "a"), ("b", "a", "b")], (0,), ()),
        # Two replicas, and rank 0 is wrong each time: it cannot be distinguished from rank 1.
        ([("x", "y", "x"), ("b", "a", "b")], (), (0, 1)),
        # Rank 1 was wrong in its repetition for rank 0 alone.
        ([("a", "c", "a"), ("b", "x", "b"), ("c", "b", "c")], (), (0, 1)),
        # Rank 1 of three is wrong each time: it differs from both neighbours.
        ([("a", "c", "a"), ("x", "y", "x"), ("c", "b", "c")], (1,), ()),
    ],
)
def test_ranks_are_named_where_a_repetition_shows_them(
    sums: Sequence[Sums], named: tuple[int, ...], suspects: tuple[int, ...]
) -> None:
    finding = decide(*_ring(*sums), step=7)
    assert (finding.named, finding.suspects, finding.agreed) == (named, suspects, 6)


def test_of_several_ranks_of_a_replica_none_is_named() -> None:
    """An error of one stage reaches the gradients of all stages."""
    finding = decide(*_ring(("x", "b", "a"), ("b", "a", "b"), ranks=2), step=3)
    assert (finding.named, finding.suspects) == ((), (0, 1))


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], ReplayCheck]:
    """A rank whose only neighbour repeats its gradients as the test says."""
    monkeypatch.setattr(replay_check.context, "part", lambda kind: types.SimpleNamespace(path=tmp_path))
    monkeypatch.setattr(replay_check.group, "of_this_job", lambda: object())
    monkeypatch.setattr(replay_check.group, "smallest", lambda everyone, numbers: [int(n) for n in numbers])
    monkeypatch.setattr(replay_check.group, "gather_all", lambda value, everyone: [value, _other(value)])
    return lambda: ReplayCheck(2, 0, printed_lines.append)


printed_lines: list[str] = []


def _other(value: ReplayRecord | str) -> ReplayRecord | str:
    return value if isinstance(value, str) else ReplayRecord(1, 0, value.repeated, "a")


def _compare(check: ReplayCheck, own_sum: str) -> None:
    check.compare(ReplayRecord(0, 1, own_sum, "b"), lambda: "a")


def test_kernels_that_differ_from_the_first_replay_on_turn_the_check_off(
    job: Callable[[], ReplayCheck],
) -> None:
    check = job()
    check.begin()
    printed_lines.clear()
    assert check.begin_step(2)
    _compare(check, "x")
    assert check.finding is None
    assert len(printed_lines) == 1
    assert not check.begin_step(4)
    restarted = job()
    restarted.begin()
    assert not restarted.begin_step(6)


def test_after_the_self_test_a_difference_is_a_finding_of_its_step_alone(
    job: Callable[[], ReplayCheck],
) -> None:
    check = job()
    check.begin()
    assert not check.begin_step(1)
    for _ in range(SELF_TEST):
        assert check.begin_step(2)
        _compare(check, "a")
    restarted = job()
    restarted.begin()
    for proven in (check, restarted):
        proven.begin_step(4)
        _compare(proven, "x")
        assert proven.finding is not None
        assert proven.finding.named == (0,)
        proven.begin_step(5)
        assert proven.finding is None


def test_an_interval_that_is_longer_than_the_job_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = {"verify_every": 8, "replay_every": 9, "drill_every": 0}
    monkeypatch.setattr(context.get(), "settings", dataclasses.replace(context.get().settings, **chosen))
    monkeypatch.setattr(state_comparison, "_is_first_rank", lambda: True)
    state_comparison.tell_of_intervals(None)
    state_comparison.tell_of_intervals(8)
    assert capsys.readouterr().err == (
        "[ttp] TTP_REPLAY_EVERY is 9, and the job ends with step 8: no step is due\n"
    )
