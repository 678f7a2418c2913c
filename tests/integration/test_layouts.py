"""The layouts and precisions that are protected, each against its own baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import (
    DP2,
    DP2_FP16,
    DP2_FP32,
    DP2_WHOLE,
    FP16_SKIPS,
    TP2_DP2,
    Job,
    Layout,
)
from tests.faults.scenario import BaselineOf, survives


@pytest.mark.parametrize(
    ("layout", "rank", "phase", "saved"),
    [
        pytest.param(layout, rank, phase, saved, id=f"{layout.name}-rank{rank}-{phase}")
        for layout, rank, phase, saved in [
            (DP2, 0, "backward", {5}),
            (DP2, 1, "update", {6}),
            (DP2_WHOLE, 0, "reduction", {5}),
            (DP2_WHOLE, 1, "door-after", {6}),
            (TP2_DP2, 0, "gather", {6}),
            (TP2_DP2, 1, "backward", {5}),
            (TP2_DP2, 2, "update", {6}),
            (TP2_DP2, 3, "reduction", {5}),
            (DP2_FP32, 0, "gather", {6}),
            (DP2_FP32, 1, "backward", {5}),
        ]
    ],
)
def test_a_rank_is_killed(
    layout: Layout, rank: int, phase: str, saved: set[int], tmp_path: Path, baseline_of: BaselineOf
) -> None:
    job = Job(
        tmp_path / "job",
        layout,
        save=tmp_path / "save",
        faults=[f"rank={rank},step=6,phase={phase},kind=sigkill"],
    )
    survives(job, baseline_of(layout), code=137, saved=saved)


@pytest.mark.parametrize(
    ("step", "phase", "saved"),
    [
        (FP16_SKIPS - 1, "update", {FP16_SKIPS - 1}),
        (FP16_SKIPS, "reduction", {FP16_SKIPS - 1}),
        (FP16_SKIPS, "overflow", {FP16_SKIPS - 1, FP16_SKIPS}),
        (FP16_SKIPS, "between", {FP16_SKIPS}),
        (FP16_SKIPS + 1, "backward", {FP16_SKIPS}),
        (FP16_SKIPS + 1, "door-after", {FP16_SKIPS + 1}),
    ],
    ids=["before", "in-reduction", "in-overflow", "in-between", "after-backward", "after-door"],
)
def test_a_rank_is_killed_around_a_skipped_step(
    step: int, phase: str, saved: set[int], tmp_path: Path, baseline_of: BaselineOf
) -> None:
    baseline = baseline_of(DP2_FP16)
    assert [line["iteration"] for line in baseline.records[0] if line["skipped"]] == [FP16_SKIPS]
    job = Job(
        tmp_path / "job",
        DP2_FP16,
        save=tmp_path / "save",
        faults=[f"rank=1,step={step},phase={phase},kind=sigkill"],
    )
    survives(job, baseline, code=137, saved=saved)
