"""Online recovery on a real GPU shared by all processes, over gloo and over NCCL; skipped without a GPU.

`python -m pytest tests/device/gpu/test_gpu_online.py -s` prints the jobs' lines of each recovery.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.device.gpu.test_gpu import DETERMINISTIC, on, trained
from tests.faults.harness import DP2, DP2_MIRROR, PP2_DP2, TP2_DP2, VPP2_DP2, Ended, Layout
from tests.faults.scenario import BaselineOf
from tests.integration.test_online import online, says, trains_on

__all__ = ["trained"]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(600),
]


def recovers(
    layout: Layout, device: str, faults: list[str], trained: dict[str, BaselineOf], tmp_path: Path
) -> Ended:
    job = online(tmp_path, on(layout, device), faults, device=device, environment=DETERMINISTIC)
    result = trains_on(job, trained[device](on(layout, device)), incidents=len(faults))
    print("", *(line for line in result.said if "training goes on" in line), sep="\n")
    return result


@pytest.mark.parametrize("device", ["shared", "nccl"])
@pytest.mark.parametrize(
    "layout", [DP2, DP2_MIRROR, TP2_DP2, PP2_DP2, VPP2_DP2], ids=lambda layout: layout.name
)
def test_a_rank_is_killed_and_replaced_twice(
    layout: Layout, device: str, trained: dict[str, BaselineOf], tmp_path: Path
) -> None:
    faults = [
        "rank=1,step=4,phase=backward,kind=sigkill",
        "rank=0,step=6,phase=gather,kind=sigkill",
    ]
    result = recovers(layout, device, faults, trained, tmp_path)
    assert says(result, r"\[ttp\] rank 1 was ended by SIGKILL; replaced by pid \d+, .*"), result.said


@pytest.mark.parametrize("device", ["shared", "nccl"])
@pytest.mark.parametrize("phase", ["forward", "norm", "update"])
def test_a_step_is_made_again_after_an_exception(
    phase: str, device: str, trained: dict[str, BaselineOf], tmp_path: Path
) -> None:
    recovers(DP2, device, [f"rank=1,step=5,phase={phase},kind=exception"], trained, tmp_path)


@pytest.mark.parametrize("device", ["shared", "nccl"])
def test_a_rank_whose_device_has_failed_is_replaced(
    device: str, trained: dict[str, BaselineOf], tmp_path: Path
) -> None:
    layout = on(DP2, device)
    job = online(
        tmp_path, layout, [], device=device, environment=DETERMINISTIC, device_fault=("1", "5", "failed")
    )
    result = trains_on(job, trained[device](layout))
    assert re.search(r"rank 1 .*replaced by pid \d+", result.log), result.said
    print("", *(line for line in result.said if "training goes on" in line), sep="\n")
