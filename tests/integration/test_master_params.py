"""Main params that Transformer Engine's Adam keeps as weights and the lower halves of their bits.

`tests/standins/te` has such an Adam.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, outcome, scenario
from tests.faults.harness import DP2, Job, Layout
from tests.integration.test_fp8 import MOMENTS, WITH_TRANSFORMER_ENGINE, baseline_of
from tests.integration.test_online import online, trains_on

OWN = ("--use-precision-aware-optimizer",)
MIRROR = replace(DP2, name="dp2-master-mirror", extra=(*OWN, "--ckpt-format", "torch_dist"), replica="mirror")
# The one kind that the framework itself loads: up to 0.17 it gives Transformer Engine a mark of padding of
# the default kind, and lower halves of the others as float32 numbers.
LOADED = replace(
    DP2,
    name="dp2-master-loaded",
    extra=(*MOMENTS, "--ckpt-format", "torch_dist", "--dist-ckpt-save-pre-mcore-014"),
)
GATHERED = replace(DP2, name="dp2-master-torch", extra=(*MOMENTS, "--main-grads-dtype", "bf16"))


def test_the_framework_goes_on_by_itself(tmp_path: Path) -> None:
    job = Job(
        tmp_path / "job",
        LOADED,
        save=tmp_path / "save",
        faults=["rank=1,step=6,phase=backward,kind=sigkill"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    scenario.survives(job, baseline_of(LOADED), code=137, saved={5}, resumed=True)


@pytest.mark.parametrize(
    ("layout", "rank"), [(GATHERED, 0), (MIRROR, 1)], ids=["lower-halves-saved-as-numbers", "mark-of-padding"]
)
def test_a_restart(layout: Layout, rank: int, tmp_path: Path) -> None:
    """The framework cannot load its own checkpoint: see `LOADED`."""
    job = Job(
        tmp_path / "job",
        layout,
        save=tmp_path / "save",
        restarts=1,
        faults=[f"rank={rank},step=6,phase=backward,kind=sigkill"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    scenario.restarts(job, baseline_of(layout), saved={5})


def test_only_the_failed_rank_is_replaced(tmp_path: Path) -> None:
    faults = ["rank=0,step=6,phase=backward,kind=sigkill"]
    trains_on(online(tmp_path, MIRROR, faults, environment=WITH_TRANSFORMER_ENGINE), baseline_of(MIRROR))


def test_copies_in_host_memory(tmp_path: Path) -> None:
    job = Job(
        tmp_path / "job",
        replace(MIRROR, replica="none"),
        save=tmp_path / "save",
        restarts=1,
        options=("--ttp-host-copy", "2"),
        faults=["rank=1,step=8,phase=backward,kind=sigkill"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    result = harness.run(job)
    assert result.code == 0, result.log[-3000:]
    assert any(line.startswith("[ttp] step 6 is written from the copies") for line in result.said), (
        result.said
    )
    baseline = baseline_of(MIRROR)
    scenario.assert_as_saved(tmp_path / "save", (6,), baseline)
    outcome.assert_same_training(result, baseline.records)
