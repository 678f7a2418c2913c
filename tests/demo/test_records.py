"""The basis of the demo's claim: the records it reads, and the comparison of two runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from demo.records import Follower, Kill, Step, compare, read_incident


def step(iteration: int, rank: int = 0, restart: int = 0, loss: float = 1.5) -> Step:
    return Step(iteration, rank, restart, float(iteration), {"lm loss": loss.hex()}, (2.0).hex())


REFERENCE = [step(iteration, rank) for iteration in (1, 2, 3) for rank in (0, 1)]


def test_a_run_equals_itself() -> None:
    assert compare(REFERENCE, REFERENCE).equal
    assert compare(REFERENCE, REFERENCE).compared == 6


def test_one_bit_of_a_loss_is_a_difference() -> None:
    flipped = [
        step(2, 1, loss=float.fromhex("0x1.8000000000001p+0")) if s == step(2, 1) else s for s in REFERENCE
    ]
    difference = compare(REFERENCE, flipped).difference
    assert difference == "iteration 2, rank 1: lm loss 0x1.8000000000000p+0 became 0x1.8000000000001p+0"


def test_a_grad_norm_counts_too() -> None:
    changed = [replace(s, grad_norm=None) if s.iteration == 3 else s for s in REFERENCE]
    assert (
        compare(REFERENCE, changed).difference
        == "iteration 3, rank 0: grad norm 0x1.0000000000000p+1 became None"
    )


def test_a_repeated_step_must_be_the_same_again() -> None:
    assert compare(REFERENCE, [*REFERENCE, step(3, restart=1)]).equal
    assert not compare(REFERENCE, [*REFERENCE, step(3, restart=1, loss=1.0)]).equal


def test_a_missing_step_is_a_difference_unless_it_was_finished_inside_the_incident() -> None:
    without = [s for s in REFERENCE if (s.iteration, s.rank) != (2, 1)]
    assert compare(REFERENCE, without).difference == "iteration 2, rank 1: not recorded"
    assert compare(REFERENCE, without, unrecorded=2).equal
    assert not compare(REFERENCE, without, unrecorded=3).equal


def test_a_step_too_many_is_a_difference() -> None:
    assert (
        compare(REFERENCE, [*REFERENCE, step(4)]).difference
        == "iteration 4, rank 0: not in the reference run"
    )


def test_two_runs_without_a_record_are_not_equal() -> None:
    assert not compare([], []).equal


def line(iteration: int) -> bytes:
    record = {
        "iteration": iteration,
        "losses": {},
        "grad_norm": None,
        "restart": 0,
        "time": 0.0,
        "skipped": 0,
    }
    return json.dumps(record).encode() + b"\n"


def test_a_follower_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "rank3.jsonl"
    follower = Follower(path, rank=3)
    assert follower.poll() == []
    path.write_bytes(line(1) + line(2)[:9])
    assert [(s.iteration, s.rank) for s in follower.poll()] == [(1, 3)]
    path.write_bytes(line(1) + line(2))
    assert [s.iteration for s in follower.poll()] == [2]
    assert follower.poll() == []


def test_the_step_in_flight_is_the_one_after_the_last_that_the_killed_rank_recorded() -> None:
    kill = Kill(rank=1, pid=1, time=8.5)
    assert kill.step([step(7, rank=1), step(8, rank=0), step(9, rank=1, restart=1)]) == 8


def test_no_report_or_two_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 incident reports"):
        read_incident(tmp_path)
    for name in "ab":
        (tmp_path / "job/incidents").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"job/incidents/{name}.json").write_text("{}")
    with pytest.raises(ValueError, match="2 incident reports"):
        read_incident(tmp_path)
