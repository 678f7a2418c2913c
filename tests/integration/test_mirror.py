"""`mirror` replicas: the framework's groups stay as they are, any data-parallel size from 2 will do.

That the framework trains on from such a state is shown in `test_layouts.py`: the files are the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2_MIRROR, DP3, DP3_FP32, Layout, job_in
from tests.faults.planned import assert_as_planned
from tests.faults.scenario import BaselineOf, assert_as_saved, survives

SAVED = {"backward": {5}, "update": {6}, "gather": {6}}
KILLED = [
    (DP3, 0, "backward"),
    (DP3, 1, "update"),
    (DP2_MIRROR, 0, "gather"),
    (DP3_FP32, 2, "update"),
]


@pytest.mark.parametrize(
    ("layout", "rank", "phase"),
    [pytest.param(*each, id=f"{each[0].name}-rank{each[1]}-{each[2]}") for each in KILLED],
)
def test_a_rank_is_killed(
    layout: Layout, rank: int, phase: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    job = job_in(tmp_path, layout, faults=[f"rank={rank},step=6,phase={phase},kind=sigkill"])
    result = survives(job, baseline_of(layout), code=137, saved=SAVED[phase])
    assert "[ttp] second copies of optimizer shards by mirror: " in result.log
    if (layout, rank) == (DP3, 0):
        assert_as_planned(result)


def test_it_goes_on_by_itself(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """An exception needs no copy. After the restart the copies are made of the state that was loaded, and the
    second incident is told by itself."""
    job = job_in(
        tmp_path,
        DP3,
        restarts=2,
        faults=[
            "rank=2,step=4,phase=backward,kind=exception",
            "rank=0,step=6,phase=backward,kind=sigkill,restart=1",
        ],
    )
    assert job.save is not None
    result = harness.run(job)
    assert result.code == 0, result.log[-3000:]
    second = "[ttp] rank 0 was ended by SIGKILL; step 5 is saved"
    assert any(line.startswith(second) for line in result.said), result.said
    assert outcome.steps_in(job.save) == [3, 5, harness.ITERATIONS]
    outcome.assert_saved(job.save, harness.ITERATIONS)
    baseline = baseline_of(DP3)
    assert_as_saved(job.save, (3,), baseline)
    outcome.assert_same_training(result, baseline.records)
