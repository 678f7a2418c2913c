"""A data loader of the script's own, whose state the framework saves for each data-parallel rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.faults import harness, keeping, scenario
from tests.faults.harness import TP2_DP2, Job
from tests.frameworks import prepare
from tests.integration.test_online import online, trains_on

SCRIPT = harness.ROOT / "tests/frameworks/train_external.py"


class _External:
    """Megatron-LM on the loader of `train_external.py`."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}

    def __call__(self, job: Job) -> list[str]:
        folder = job.save or job.load
        assert folder is not None
        options = ("--dataloader-type", "external", "--dataloader-save", str(folder.with_name("loaders")))
        return [str(SCRIPT), *harness.training(job), *options]


EXTERNAL = _External()
FOUND = {"PYTHONPATH": str(prepare.megatron_lm())}
baseline_of = scenario.baselines(keeping.KEPT, environment=FOUND, program=EXTERNAL)


def _job(tmp_path: Path, **options: Any) -> Job:
    fault = "rank=2,step=6,phase=backward,kind=sigkill"
    return online(tmp_path, TP2_DP2, [fault], environment=FOUND, program=EXTERNAL, **options)


def _assert_states(tmp_path: Path, *steps: int) -> None:
    """Assert that the loader states equal the framework's saved states of `steps`."""
    for step in steps:
        states = [
            {path.name: torch.load(path) for path in root.glob(f"loaders/iter_{step:07d}/mp_rank_00/*")}
            for root in (tmp_path, baseline_of(TP2_DP2).checkpoints.parent)
        ]
        assert states[0] == states[1] != {}


def test_the_framework_goes_on_from_the_states_of_the_step(tmp_path: Path) -> None:
    """The state of the killed rank included."""
    job = _job(tmp_path, restarts=0, options=("--ttp-online", "0"))
    scenario.survives(job, baseline_of(TP2_DP2), code=137, saved={5}, resumed=True)
    _assert_states(tmp_path, 5)


def test_a_new_process_reads_on_where_the_lost_one_was(tmp_path: Path) -> None:
    result = trains_on(_job(tmp_path), baseline_of(TP2_DP2))
    assert "rank 2: the loader begins at row 10\n" in result.log
    _assert_states(tmp_path, 5, 8)
