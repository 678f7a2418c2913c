"""Without a fault the adaptor changes nothing: neither the training nor what the framework saves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, ITERATIONS, TP2_DP2, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf


@pytest.mark.parametrize(
    "layout", [pytest.param(DP2, marks=pytest.mark.cold), TP2_DP2], ids=["dp2", "tp2-dp2"]
)
def test_no_fault(layout: Layout, tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(layout)
    save = tmp_path / "save"
    ended = harness.run(Job(tmp_path / "job", layout, save=save, save_interval=4))
    assert ended.code == 0, ended.log[-3000:]
    protected, replicas = sorted(ended.said)
    assert replicas.startswith("[ttp] second copies of optimizer shards by split, 2 instances: ")
    assert protected == "[ttp] protected from step 1 (split; any 1 rank)"
    outcome.assert_same_training(ended, baseline.records)
    outcome.assert_saved(save, ITERATIONS)
    assert outcome.steps_in(save) == [4, ITERATIONS]
    for step in (4, ITERATIONS):
        name = f"iter_{step:07d}"
        assert differences(save / name, baseline.checkpoints / name) == []
