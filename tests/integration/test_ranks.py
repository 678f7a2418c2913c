"""Whichever rank fails, no finished step is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, DP4, ITERATIONS, Job
from tests.faults.scenario import BaselineOf, assert_as_saved, survives


# Rank 1 raises in test_phases.py.
@pytest.mark.parametrize("rank", [0, 3])
def test_an_exception_in_a_rank(rank: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        faults=[f"rank={rank},step=6,phase=forward,kind=exception"],
    )
    ended = survives(job, baseline_of(DP4), code=1, saved={5})
    assert ended.last_line.startswith(f"[ttp] rank {rank} raised ")
    assert "InjectedError" in ended.last_line


def test_two_ranks_of_different_shards_at_once(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        faults=["rank=0,step=6,phase=backward,kind=sigkill,also=3"],
    )
    survives(job, baseline_of(DP4), code=137, saved={5})


def test_one_fault_after_the_other(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Each start of the workers has an incident of its own."""
    save = tmp_path / "save"
    faults = [
        "rank=1,step=3,phase=forward,kind=exception",
        "rank=0,step=6,phase=backward,kind=sigkill,restart=1",
    ]
    ended = harness.run(Job(tmp_path / "job", DP2, save=save, restarts=2, faults=faults))
    assert ended.code == 0, ended.log[-3000:]
    (line,) = [line for line in ended.said if "was ended by" in line]
    assert line.startswith("[ttp] rank 0 was ended by SIGKILL; step 5 is saved")
    assert outcome.steps_in(save) == [2, 5, ITERATIONS]
    outcome.assert_saved(save, ITERATIONS)
    assert_as_saved(save, (2,), baseline_of(DP2))
    outcome.assert_same_training(ended, baseline_of(DP2).records)
