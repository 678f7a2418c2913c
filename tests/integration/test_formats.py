"""A job that saves in `torch_dist` has its last words in `torch`, and goes on from them by itself."""

from __future__ import annotations

from pathlib import Path

from adaptor.checkpoint import manifest
from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, Job
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf


def test_torch_dist(tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(DP2)
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        save_interval=4,
        restarts=1,
        arguments=["--ckpt-format", "torch_dist"],
        faults=["rank=1,step=7,phase=backward,kind=sigkill"],
    )
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    assert outcome.steps_in(save) == [4, 6, ITERATIONS]
    assert (save / "iter_0000004" / ".metadata").exists()
    assert (save / "iter_0000006" / "mp_rank_00" / "model_optim_rng.pt").exists()
    assert (save / f"iter_{ITERATIONS:07d}" / ".metadata").exists()
    differing = differences(save / "iter_0000006", baseline.checkpoints / "iter_0000006")
    assert sorted(differing) == [
        "mp_rank_00/model_optim_rng.pt/args./ckpt_format: 'torch_dist' and 'torch'",
        "mp_rank_00/model_optim_rng.pt/args./use_dist_ckpt: True and False",
    ]
    outcome.assert_saved(save, ITERATIONS)
    outcome.assert_same_training(ended, baseline.records)


def test_an_asynchronous_save(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A death while other processes may still write: that save is complete under its name, or not there."""
    baseline = baseline_of(DP2)
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        save_interval=3,
        restarts=1,
        arguments=["--ckpt-format", "torch_dist", "--async-save"],
        faults=["rank=1,step=7,phase=backward,kind=sigkill"],
    )
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    steps = outcome.steps_in(save)
    assert {6, ITERATIONS} <= set(steps) <= {3, 6, ITERATIONS}, "nobody waits for the save of step 3"
    assert [manifest.verify(save / f"iter_{step:07d}") for step in steps] == [[]] * len(steps)
    outcome.assert_saved(save, ITERATIONS)
    outcome.assert_same_training(ended, baseline.records)
