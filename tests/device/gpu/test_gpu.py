"""On a real GPU, and skipped without one: `python -m pytest tests/device/gpu -s` prints the figures.

First `python tests/frameworks/prepare.py`, where the network is; see docs/accelerators.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.device.gpu import exchange
from tests.faults import harness, keeping, outcome
from tests.faults.harness import DP2, DP2_FP16, DP2_MIRROR, DP3, Job, Layout
from tests.faults.scenario import BaselineOf, assert_last_words, baselines, ends, survives

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.timeout(1200),
]

# So that two runs of the framework have the same bits on a GPU.
DETERMINISTIC = {"NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
HANG_S = 30


def probe(name: str, **environment: str) -> dict[str, Any]:
    completed = subprocess.run(
        [sys.executable, "-m", "tests.device.gpu.probes", name],
        cwd=harness.ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    assert completed.stdout, f"nothing was said, and the code was {completed.returncode}"
    answer: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    print(f"\n{name} {environment}: {answer}")
    return answer


@pytest.mark.parametrize("connections", ["1", "8"])
def test_state_is_copied_beside_a_kernel_that_never_ends(connections: str) -> None:
    answer = probe("blocked", CUDA_DEVICE_MAX_CONNECTIONS=connections)
    assert answer.pop("gigabytes per second") > 0
    assert answer == {
        "same": True,
        "unreadable": "",
        "before": True,
        "after": False,
        "waited": False,
        "stream ended": False,
    }


def test_a_device_that_has_failed_says_so_at_once() -> None:
    answer = probe("failed")
    assert answer["raised"]
    assert "CUDA error" in answer["unreadable"]
    assert answer["copy"]
    assert answer["seconds"] < 1


def test_a_dump_of_a_large_model_takes_about_as_long_as_torch_save() -> None:
    assert probe("speed")["ratio"] < 1.5


def test_a_rank_is_replaced_under_nccl() -> None:
    """Its peer hangs in a collective; the communicators are aborted, and the backends exchanged, again and
    again."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.device.gpu.exchange"],
        cwd=harness.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=False,
    )
    answer = json.loads(completed.stdout.splitlines()[-1])
    print(f"\nexchange: {answer}")
    assert answer["before"] == [3, 3, 1]
    assert [(round_["hung"], round_["sums"]) for round_ in answer["rounds"]] == [
        (True, [3, 3, 1])
    ] * exchange.ROUNDS


# training: on one GPU for all processes over gloo and over NCCL, and on one each with NCCL


@pytest.fixture(params=["shared", "nccl", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and torch.cuda.device_count() < 3:
        pytest.skip("there is no GPU for each process")
    return str(request.param)


@pytest.fixture(scope="module")
def trained() -> dict[str, BaselineOf]:
    """Runs of the unmodified framework, by the kind of device."""
    kept = Path(os.environ.get("TTP_TEST_BASELINES", keeping.KEPT)) / torch.cuda.get_device_name(0)
    return {
        name: baselines(kept, device=name, environment=DETERMINISTIC) for name in ("shared", "nccl", "cuda")
    }


def on(layout: Layout, device: str) -> Layout:
    backend = () if device == "shared" else ("--distributed-backend", "nccl")
    return replace(layout, extra=(*layout.extra, "--deterministic-mode", *backend))


def job_of(layout: Layout, device: str, tmp_path: Path, **job_options: Any) -> Job:
    all_options: dict[str, Any] = {"save": tmp_path / "save", "environment": DETERMINISTIC, **job_options}
    return Job(tmp_path / "job", on(layout, device), device=device, **all_options)


@pytest.mark.parametrize("phase", ["backward", "update"])
@pytest.mark.parametrize("layout", [DP2, DP2_FP16, DP2_MIRROR, DP3], ids=lambda layout: layout.name)
def test_a_rank_is_killed(
    layout: Layout, phase: str, device: str, trained: dict[str, BaselineOf], tmp_path: Path
) -> None:
    fault = f"rank=1,step=7,phase={phase},kind=sigkill"
    job = job_of(layout, device, tmp_path, faults=[fault])
    saved = {6} if phase == "backward" else {7}
    survives(job, trained[device](on(layout, device)), code=137, saved=saved, resumed=True)


@pytest.mark.parametrize("layout", [DP2, DP2_MIRROR], ids=lambda layout: layout.name)
def test_nothing_else_changes(
    layout: Layout, device: str, trained: dict[str, BaselineOf], tmp_path: Path
) -> None:
    result = harness.run(job_of(layout, device, tmp_path), code=0)
    outcome.assert_same_training(result, trained[device](on(layout, device)).records)


def test_the_step_before_comes_from_a_local_copy(
    device: str, trained: dict[str, BaselineOf], tmp_path: Path
) -> None:
    job = job_of(
        DP2_MIRROR,
        device,
        tmp_path,
        faults=["rank=1,step=7,phase=update,kind=exception"],
        options=["--ttp-local-copy", "True"],
    )
    # Without a barrier the other rank may have finished the step, and then it has all of it.
    survives(job, trained[device](on(DP2_MIRROR, device)), code=1, saved={6, 7}, resumed=True)


@pytest.mark.parametrize("device", ["shared", "nccl"])
@pytest.mark.parametrize("fault", ["blocked", "failed"])
def test_a_device_breaks(fault: str, device: str, trained: dict[str, BaselineOf], tmp_path: Path) -> None:
    """A blocked device still provides the state, unless the main thread has queued a copy behind the kernel,
    as over NCCL; a failed device provides none. The other rank has the state.
    """
    job = job_of(
        DP2_MIRROR,
        device,
        tmp_path,
        device_fault=("1", "7", fault),
        options=["--ttp-hang", str(HANG_S)],
    )
    baseline = trained[device](on(DP2_MIRROR, device))
    # NCCL's watchdog ends a process whose device has failed, before its exception does.
    is_ended = fault == "failed" and device == "nccl"
    result, step = ends(job, baseline, code=134 if is_ended else 1, saved={6})
    assert job.save is not None
    assert_last_words(job.save, step, baseline)
    reports = (tmp_path / "job" / "logs").rglob("*.json")
    answer = "".join(path.read_text() for path in reports)
    is_unreadable = fault == "failed" or device == "nccl"
    assert is_ended or ("unreadable" in answer) == is_unreadable
    print(f"\n{fault}: {result.last_line}")
