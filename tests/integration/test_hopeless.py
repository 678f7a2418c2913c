"""Faults after which no state can be saved: the job reports the reason, and earlier checkpoints stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from adaptor.checkpoint import manifest
from tests.faults import harness, outcome
from tests.faults.harness import DP2, DP4, Job, job_in
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf


def test_both_holders_of_a_shard_are_killed(tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(DP4)
    job = job_in(tmp_path, DP4, save_interval=4, faults=["rank=1,step=7,phase=backward,kind=sigkill,also=3"])
    result = harness.run(job, code=137)
    assert job.save is not None
    folder = outcome.assert_saved(job.save, 4)
    assert differences(folder, baseline.checkpoints / folder.name) == []
    assert outcome.steps_in(job.save) == [4]
    line = result.last_line
    assert re.match(r"\[ttp\] rank [13] was ended by SIGKILL, rank [13] was ended by SIGKILL;", line)
    assert "shard 1 of 2 of group mp_rank_00 has no live holder, it was on rank 1 and 3" in line
    assert "would have helped" in line
    assert line.endswith(f"the newest checkpoint in {job.save} is step 4")


def test_no_replica_was_asked_for(tmp_path: Path) -> None:
    job = job_in(
        tmp_path,
        DP2,
        options=["--ttp-replica", "none", "--ttp-host-copy", "0"],
        faults=["rank=1,step=3,phase=backward,kind=sigkill"],
    )
    result = harness.run(job, code=137)
    assert job.save is not None
    assert list(job.save.iterdir()) == []
    assert "shard 1 of 2 of group mp_rank_00 has no live holder, it was on rank 1" in result.last_line
    assert "TTP_REPLICA=auto" in result.last_line
    assert result.last_line.endswith(f"no checkpoint is in {job.save}")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("rank=1,phase=start,kind=sigkill", 137),
        ("rank=0,phase=start,kind=exception", 1),
        ("rank=1,step=1,phase=backward,kind=os._exit,code=7", 7),
    ],
    ids=["killed-before-the-model", "exception-before-the-model", "exit-in-step-1"],
)
def test_before_the_first_step_has_finished(fault: str, code: int, tmp_path: Path) -> None:
    job = job_in(tmp_path, DP2, faults=[fault])
    result = harness.run(job, code=code)
    assert job.save is not None
    assert list(job.save.iterdir()) == []
    assert "nothing to save: no step has finished" in result.last_line
    assert len([line for line in result.said if "nothing to save" in line]) == 1


def test_a_finished_checkpoint_is_not_written_again(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Resumed at step 4, and killed before the next has finished: there is nothing new."""
    save = tmp_path / "save"
    harness.run(
        Job(tmp_path / "first", DP2, save=save, arguments=["--exit-interval", "4"], save_interval=4), code=0
    )
    manifest_before = manifest.read(save / "iter_0000004")
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        load=save,
        faults=["rank=0,step=5,phase=backward,kind=sigkill"],
    )
    result = harness.run(job, code=137)
    assert outcome.assert_saved(save, 4) == save / "iter_0000004"
    assert manifest.read(save / "iter_0000004") == manifest_before
    assert "nothing to save: no step has finished since step 4" in result.last_line
