"""The adaptor changes nothing in a training without a fault, nor does a fault after the training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, TP2_DP2, Job, Layout, job_in
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf

# A trace of two steps, and what all modules compute in two others.
RECORDED = ("--ttp-profile", "steps=2-3,ranks=1", "--ttp-dump", '{"steps": "3,5", "ranks": [0, 3]}')


@pytest.mark.parametrize(
    ("layout", "options"),
    [pytest.param(DP2, (), marks=pytest.mark.cold), (TP2_DP2, RECORDED)],
    ids=["dp2", "tp2-dp2-recorded"],
)
def test_no_fault(layout: Layout, options: tuple[str, ...], tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(layout)
    save = tmp_path / "save"
    result = harness.run(Job(tmp_path / "job", layout, save=save, save_interval=4, options=options), code=0)
    recorded = [line for line in result.said if "TTP_PROFILE" in line or "TTP_DUMP" in line]
    assert len(recorded) == (3 if options else 0), recorded
    assert {path.name for path in (tmp_path / "job/logs").glob("record-*/*")} == (
        {"profile-rank1-steps2-3", "dump-rank0.jsonl", "dump-rank3.jsonl"} if options else set()
    )
    protected, replicas = sorted(set(result.said) - set(recorded))
    assert replicas.startswith("[ttp] second copies of optimizer shards by split, 2 instances: ")
    assert protected == "[ttp] protected from step 1 (split; any 1 rank)"
    outcome.assert_same_training(result, baseline.records)
    outcome.assert_saved(save, ITERATIONS)
    assert outcome.steps_in(save) == [4, ITERATIONS]
    for step in (4, ITERATIONS):
        name = f"iter_{step:07d}"
        assert differences(save / name, baseline.checkpoints / name) == []


@pytest.mark.parametrize(
    ("fault", "code", "cause"),
    [
        ("phase=finished,kind=sigsegv", 0, "was ended by SIGSEGV"),
        ("phase=logger,kind=exception", 1, "raised InjectedError"),
    ],
    ids=["death", "logger"],
)
def test_a_fault_behind_the_training_starts_nothing_again(
    fault: str, code: int, cause: str, tmp_path: Path
) -> None:
    job = job_in(tmp_path, DP2, save_interval=4, restarts=1, faults=[f"rank=1,{fault}"])
    result = harness.run(job, code=code)
    outcome.assert_saved(tmp_path / "save", ITERATIONS)
    assert all(line["restart"] == 0 for lines in result.records.values() for line in lines)
    (line,) = [line for line in result.said if f"rank 1 {cause}" in line]
    assert "; nothing to save: the training was over" in line
