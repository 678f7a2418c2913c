"""No decision rests on the time of day."""

from __future__ import annotations

from pathlib import Path

from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, Job
from tests.faults.scenario import BaselineOf


def test_a_clock_that_is_put_back(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The regular save of step 4 says that it is of the day before, and is that of these workers all the
    same: last words of step 4 do not take its place."""
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        save_interval=4,
        restarts=1,
        faults=["rank=0,step=2,phase=forward,kind=clock", "rank=1,step=5,phase=forward,kind=sigkill"],
    )
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    outcome.assert_saved(save, ITERATIONS)
    assert outcome.steps_in(save) == [4, ITERATIONS]
    outcome.assert_same_training(ended, baseline_of(DP2).records)
    (said,) = [line for line in ended.said if "was ended by" in line]
    assert "step 4 is saved, no finished step is lost" in said
