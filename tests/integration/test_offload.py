"""An optimizer on the host (--optimizer-cpu-offload), which Megatron-core's own class updates."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import scenario
from tests.faults.harness import DP2, job_in
from tests.integration.test_fp8 import WITH_TRANSFORMER_ENGINE, baseline_of
from tests.integration.test_online import online, trains_on

OFFLOADED = (
    *("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"),
    *("--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"),
)
# From its other kinds of checkpoints the framework itself goes on with other weights or main params.
SHARDED = ("--ckpt-format", "torch_dist", "--dist-ckpt-optim-fully-reshardable")
SPLIT = replace(DP2, name="dp2-offload", extra=(*OFFLOADED, *SHARDED))
MIRROR = replace(DP2, name="dp2-offload-mirror", extra=OFFLOADED, replica="mirror")


@pytest.fixture(autouse=True)
def _classes_in_checkpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Param groups name classes of Transformer Engine's stand-in, which a comparison imports."""
    monkeypatch.syspath_prepend(WITH_TRANSFORMER_ENGINE["PYTHONPATH"])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]


def test_the_framework_goes_on_by_itself(tmp_path: Path) -> None:
    """The framework's checkpoints name classes, which torch since 2.6 loads only with a setting."""
    environment = {**WITH_TRANSFORMER_ENGINE, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    job = job_in(tmp_path, SPLIT, faults=["rank=1,step=6,phase=update,kind=sigkill"], environment=environment)
    scenario.survives(job, baseline_of(SPLIT), code=137, saved={6}, resumed=True)


def test_a_restart(tmp_path: Path) -> None:
    job = job_in(
        tmp_path,
        MIRROR,
        restarts=1,
        faults=["rank=0,step=6,phase=backward,kind=sigkill"],
        environment=WITH_TRANSFORMER_ENGINE,
    )
    scenario.restarts(job, baseline_of(MIRROR), saved={5})


def test_only_the_failed_rank_is_replaced(tmp_path: Path) -> None:
    faults = ["rank=1,step=6,phase=backward,kind=sigkill"]
    trains_on(online(tmp_path, MIRROR, faults, environment=WITH_TRANSFORMER_ENGINE), baseline_of(MIRROR))
