"""No decision rests on the time of day."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, Job
from tests.faults.scenario import BaselineOf


@pytest.mark.parametrize("kind", ["clock-back", "clock-ahead"])
def test_a_clock_that_jumps_by_a_day(kind: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The clock puts the regular save of step 4 on the day before, or after; it still belongs to these
    workers, and last words of step 4 do not replace it.
    """
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        save_interval=4,
        restarts=1,
        faults=[f"rank=0,step=2,phase=forward,kind={kind}", "rank=1,step=5,phase=forward,kind=sigkill"],
    )
    result = harness.run(job, code=0)
    outcome.assert_saved(save, ITERATIONS)
    assert outcome.steps_in(save) == [4, ITERATIONS]
    outcome.assert_same_training(result, baseline_of(DP2).records)
    (outcome_line,) = [line for line in result.said if "was ended by" in line]
    assert "step 4 is saved, no finished step is lost" in outcome_line
