"""fp8, weights in fp8, moments in bfloat16: Megatron-LM's own code, and a stand-in for Transformer Engine.

The stand-in (`tests/standins/te`) rounds as in Transformer Engine's sources, and keeps state under the same
names and types.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, keeping, outcome, scenario
from tests.faults.harness import DP2, ITERATIONS, Layout, job_in
from tests.faults.same import differences
from tests.integration.test_online import online, trains_on

WITH_TRANSFORMER_ENGINE = {"PYTHONPATH": str(harness.ROOT / "tests/standins/te")}
baseline_of = scenario.baselines(keeping.KEPT, environment=WITH_TRANSFORMER_ENGINE)


def fp8(name: str, recipe: str, *extra: str, replica: str = "auto") -> Layout:
    """A layout that computes in fp8, on two ranks."""
    kernels = ("--transformer-impl", "transformer_engine", "--attention-dropout", "0")
    formats = ("--fp8-format", "e4m3", "--fp8-recipe", recipe, "--ckpt-format", "torch_dist")
    extra = (*kernels, *formats, *extra)
    return replace(DP2, name=f"dp2-fp8-{name}", extra=extra, replica=replica)


WEIGHTS = "--fp8-param-gather"
MOMENTS = ("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16")
BLOCKWISE = fp8("blockwise", "blockwise", *MOMENTS)
TENSORWISE = fp8(
    "tensorwise-mirror",
    "tensorwise",
    *(WEIGHTS, *MOMENTS, "--dist-ckpt-optim-fully-reshardable"),
    replica="mirror",
)
# With --overlap-param-gather a save of 0.15.0rc5 changes what the framework itself trains from there on.
MXFP8 = fp8("mxfp8", "mxfp8", WEIGHTS, "--reuse-grad-buf-for-mxfp8-param-ag", *MOMENTS)
# An evaluation leaves its largest elements to the step behind it. The prediction of a second token is a
# context of its own: where the first context ends, a survivor reduces the histories of both.
DELAYED = fp8(
    "delayed",
    "delayed",
    *("--fp8-amax-history-len", "3", "--fp8-amax-compute-algo", "max"),
    *("--eval-interval", "4", "--eval-iters", "2", "--split", "90,10,0"),
    *("--mtp-num-layers", "1", "--position-embedding-type", "rope"),
)
# A chain of two optimizers, each of which compares the largest elements of its weights over its ranks.
EXPERTS = fp8("experts", "blockwise", WEIGHTS, *harness.EXPERTS)


@pytest.mark.parametrize("layout", [TENSORWISE, MXFP8, EXPERTS, DELAYED], ids=lambda layout: layout.name)
def test_only_the_failed_rank_is_replaced(layout: Layout, tmp_path: Path) -> None:
    """The last words, and the training after them, equal those of the framework bit for bit."""
    faults = ["rank=1,step=6,phase=backward,kind=sigkill"]
    trains_on(online(tmp_path, layout, faults, environment=WITH_TRANSFORMER_ENGINE), baseline_of(layout))


def test_an_evaluation_before_the_fault(tmp_path: Path) -> None:
    """The largest elements that the killed rank alone has evaluated are those of its successor, too.

    The framework saves rank 0's own, last words the maximum.
    """
    baseline = baseline_of(DELAYED)
    faults = ["rank=1,step=5,phase=backward,kind=sigkill"]
    job = online(tmp_path, DELAYED, faults, environment=WITH_TRANSFORMER_ENGINE)
    outcome.assert_same_training(harness.run(job, code=0), baseline.records, steps={5, 6, 7, ITERATIONS})
    assert job.save is not None
    scenario.assert_as_saved(job.save, [ITERATIONS], baseline)
    step = f"iter_{4:07d}"
    lines = differences(job.save / step, baseline.checkpoints / step)
    assert lines, "no largest element was that of rank 1"
    assert all(line.endswith("amax_history_fwd: other bits") for line in lines), lines


@pytest.mark.parametrize("layout", [BLOCKWISE, DELAYED], ids=lambda layout: layout.name)
def test_the_framework_goes_on_by_itself(layout: Layout, tmp_path: Path) -> None:
    job = job_in(
        tmp_path,
        layout,
        faults=["rank=1,step=6,phase=backward,kind=sigkill"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    scenario.survives(job, baseline_of(layout), code=137, saved={5}, resumed=True)


def test_copies_in_host_memory(tmp_path: Path) -> None:
    """Both ranks are killed; new processes write the histories before any forward pass."""
    job = job_in(
        tmp_path,
        DELAYED,
        options=["--ttp-host-copy", "1"],
        restarts=1,
        faults=["rank=1,step=8,phase=backward,kind=sigkill,also=0"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    baseline = baseline_of(DELAYED)
    result = harness.run(job, code=0)
    assert "[ttp] step 7 is written from the copies in host memory (nothing was saved)" in result.said
    assert job.save is not None
    scenario.assert_as_saved(job.save, [7], baseline)
    outcome.assert_same_training(result, baseline.records)


def test_a_restart_with_weights_in_fp8(tmp_path: Path) -> None:
    job = job_in(
        tmp_path,
        EXPERTS,
        restarts=1,
        faults=["rank=0,step=6,phase=backward,kind=sigkill"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    scenario.restarts(job, baseline_of(EXPERTS), saved={5})
