"""The protected layouts and precisions, mixtures of experts included, each with its own baseline."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import (
    DP2,
    DP2_FP16,
    DP2_MIRROR,
    DP2_SGD,
    DP2_WHOLE,
    DP3,
    DP3_FP32,
    DP3_OVERLAP,
    FP16_SKIPS,
    MOE_DP2,
    MOE_EP2,
    MOE_EP2_DP2,
    MOE_ETP2,
    MOE_TP2_EP2,
    PP2_TP2_DP2,
    TP2_DP1,
    TP2_DP2,
    VPP2_DP2_OVERLAP,
    Job,
    Layout,
    job_in,
)
from tests.faults.planned import assert_as_planned
from tests.faults.scenario import BaselineOf, assert_as_saved, first_of_each, survives

# Each kind of state, and layouts that `test_online.py` has not, or whose half of a step it has not: what is
# saved there is compared in the same way. `python -m tests.integration.matrix` does so with each layout.
KILLED = [
    (DP2, 1, "update", {6}),
    (DP2_WHOLE, 1, "door-after", {6}),
    (TP2_DP2, 0, "gather", {6}),
    (PP2_TP2_DP2, 5, "reduction", {5}),
    (VPP2_DP2_OVERLAP, 1, "door-after", {6}),
    (DP3_OVERLAP, 1, "between", {6}),
    (DP3, 0, "backward", {5}),
    (DP2_MIRROR, 0, "gather", {6}),
    (DP3_FP32, 2, "update", {6}),
    (DP2_SGD, 1, "update", {6}),
    # Chains of optimizers, whose groups have different sizes.
    (MOE_DP2, 1, "backward", {5}),
    (MOE_EP2, 0, "backward", {5}),
    (MOE_TP2_EP2, 1, "norm", {5}),
    (MOE_ETP2, 1, "update", {6}),
]
# Those whose job is also compared with its plan.
PLANNED = [(DP2, 1), (DP2_WHOLE, 1), (TP2_DP2, 0), (PP2_TP2_DP2, 5), (DP3, 0), (MOE_EP2, 0)]
# Those whose second copies must be mirrors; the framework's groups stay as they are.
MIRRORED = (DP3, DP2_MIRROR, DP3_FP32)


@pytest.mark.parametrize(
    ("layout", "rank", "phase", "saved", "resumed"),
    [
        pytest.param(layout, rank, phase, saved, resumed, id=f"{layout.name}-rank{rank}-{phase}")
        for (layout, rank, phase, saved), resumed in zip(
            KILLED, first_of_each([layout for layout, *_ in KILLED]), strict=True
        )
    ],
)
def test_a_rank_is_killed(
    layout: Layout,
    rank: int,
    phase: str,
    saved: set[int],
    resumed: bool,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    job = job_in(tmp_path, layout, faults=[f"rank={rank},step=6,phase={phase},kind=sigkill"])
    result = survives(job, baseline_of(layout), code=137, saved=saved, resumed=resumed)
    if layout in MIRRORED:
        assert "[ttp] second copies of optimizer shards by mirror: " in result.log
    if (layout, rank) in PLANNED:
        assert_as_planned(result)


@pytest.mark.parametrize(
    ("step", "phase", "saved"),
    [
        (FP16_SKIPS, "reduction", {FP16_SKIPS - 1}),
        (FP16_SKIPS, "overflow", {FP16_SKIPS - 1, FP16_SKIPS}),
        (FP16_SKIPS, "between", {FP16_SKIPS}),
        (FP16_SKIPS + 1, "door-after", {FP16_SKIPS + 1}),
    ],
    ids=["in-reduction", "in-overflow", "in-between", "after-door"],
)
def test_a_rank_is_killed_around_a_skipped_step(
    step: int, phase: str, saved: set[int], tmp_path: Path, baseline_of: BaselineOf
) -> None:
    baseline = baseline_of(DP2_FP16)
    assert [line["iteration"] for line in baseline.records[0] if line["skipped"]] == [FP16_SKIPS]
    job = job_in(tmp_path, DP2_FP16, faults=[f"rank=1,step={step},phase={phase},kind=sigkill"])
    survives(job, baseline, code=137, saved=saved, resumed=phase == "between")


def test_a_data_parallel_size_of_one_survives_an_exception(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """There is no second rank for a copy, and the user is told so at the start."""
    job = job_in(
        tmp_path,
        TP2_DP1,
        options=["--ttp-host-copy", "0"],
        faults=["rank=1,step=6,phase=backward,kind=exception"],
    )
    result = survives(job, baseline_of(TP2_DP1), code=1, saved={5})
    (replica_line,) = [line for line in result.said if "the data-parallel size is 1" in line]
    assert "exceptions are survived, the death of a process is not" in replica_line


def test_experts_that_no_two_ranks_share(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """An exception is survived, a death without host copies is not: the user is told so at the start."""
    job = job_in(
        tmp_path,
        MOE_EP2_DP2,
        options=["--ttp-host-copy", "0"],
        faults=["rank=1,step=6,phase=backward,kind=exception"],
    )
    result = survives(job, baseline_of(MOE_EP2_DP2), code=1, saved={5})
    assert (
        "but none of experts, which no two ranks share: exceptions are survived, the death of" in result.log
    )
    assert (
        "; TTP_HOST_COPY=auto keeps copies in host memory, from which at most 50 steps are lost)"
        in result.log
    )
    job = Job(
        tmp_path / "killed",
        MOE_EP2_DP2,
        save=tmp_path / "nothing",
        options=["--ttp-host-copy", "0"],
        faults=["rank=1,step=3,phase=backward,kind=sigkill"],
    )
    lost = harness.run(replace(job, layout=replace(MOE_EP2_DP2, replica="auto")), code=137)
    assert "no second copies of optimizer shards (no two ranks share experts)" in lost.log
    assert "or copies in host memory (TTP_HOST_COPY), would have helped" in lost.last_line
    assert " has no live holder, it was on rank 1; a second copy of each shard (TTP_REPLICA=auto) and a" in (
        lost.last_line
    )
    assert outcome.steps_in(tmp_path / "nothing") == []


def test_a_job_with_mirrors_goes_on_by_itself(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """After the restart, mirrors are made of the loaded state; the second incident has lines of its own."""
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
    result = harness.run(job, code=0)
    second = "[ttp] rank 0 was ended by SIGKILL; step 5 is saved"
    assert any(line.startswith(second) for line in result.said), result.said
    assert outcome.steps_in(job.save) == [3, 5, harness.ITERATIONS]
    outcome.assert_saved(job.save, harness.ITERATIONS)
    baseline = baseline_of(DP3)
    assert_as_saved(job.save, (3,), baseline)
    outcome.assert_same_training(result, baseline.records)
