"""Mixtures of experts: a chain of optimizers, whose groups have different sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import MOE_DP2, MOE_EP2, MOE_EP2_DP2, MOE_TP2_EP2, Job, Layout, job_in
from tests.faults.planned import assert_as_planned
from tests.faults.scenario import BaselineOf, first_of_each, survives

# Two ranks have each expert together; the format `torch` has one folder for both parts.
MOE_ETP2 = Layout(
    "moe-dp4-etp2",
    4,
    extra=(*harness.EXPERTS, "--expert-tensor-parallel-size", "2", "--ckpt-format", "torch_dist"),
)
# `test_online.py` has MOE_EP2 early and late in a step, and with mirrors.
# `python -m tests.integration.matrix` has each layout.
KILLED = [
    (MOE_DP2, 1, "backward", {5}),
    (MOE_EP2, 0, "backward", {5}),
    (MOE_TP2_EP2, 1, "norm", {5}),
    (MOE_ETP2, 1, "update", {6}),
]


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
    ended = survives(job, baseline_of(layout), code=137, saved=saved, resumed=resumed)
    if (layout, rank) == (MOE_EP2, 0):
        assert_as_planned(ended)


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
    lost = harness.run(replace(job, layout=replace(MOE_EP2_DP2, replica="auto")))
    assert lost.code == 137
    assert "no second copies of optimizer shards (no two ranks share experts)" in lost.log
    assert "or copies in host memory (TTP_HOST_COPY), would have helped" in lost.last_line
    assert " has no live holder, it was on rank 1; a second copy of each shard (TTP_REPLICA=auto) and a" in (
        lost.last_line
    )
    assert outcome.steps_in(tmp_path / "nothing") == []
