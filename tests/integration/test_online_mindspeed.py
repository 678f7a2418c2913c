"""Online recovery of a loop like MindSpeed-LLM's: a small framework (tests/frameworks/small_llm), with
process groups of a stand-in for HCCL.

MindSpeed-LLM itself is trained by hand: `python -m tests.frameworks.by_hand`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.harness import DP2, Job
from tests.faults.scenario import BaselineOf
from tests.frameworks import prepare
from tests.integration.test_online import online, trains_on

TESTS = Path(__file__).resolve().parents[1]
SMALL, HCCL = TESTS / "frameworks" / "small_llm", TESTS / "standins" / "hccl"


class Small:
    """A `Program` of the harness."""

    environment = {  # noqa: RUF012
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SMALL), str(HCCL), os.environ.get("PYTHONPATH")]))
    }

    def __call__(self, job: Job) -> list[str]:
        script = prepare.megatron_lm() / "pretrain_gpt.py"
        return [str(SMALL / "pretrain.py"), str(script), *harness.training(job)]


@pytest.mark.integration
def test_a_loop_that_counts_from_0_when_it_is_called(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The last checkpoint counts the operations of all steps, though the loop was called three times; the
    line of step 6, after whose update rank 1 dies, is written by the framework's own function.
    """
    faults = [
        "rank=0,step=4,phase=backward,kind=exception",
        "rank=1,step=6,phase=gather,kind=sigkill",
    ]
    trains_on(online(tmp_path, DP2, faults, program=Small()), baseline_of(DP2), incidents=2)
