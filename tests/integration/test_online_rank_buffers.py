"""Buffers that ranks share outside of process groups are made anew when a rank was replaced.

Stand-ins with the same life cycle take the places of Transformer Engine's user buffers and of DeepEP's.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults import harness, keeping
from tests.faults.harness import MOE_TP2_EP2, ROOT, Job
from tests.faults.scenario import baselines
from tests.frameworks import prepare
from tests.integration.test_online import online, trains_on

DEEP_EP, SCRIPT = ROOT / "tests/standins/rank_buffers", ROOT / "tests/frameworks/user_buffers/pretrain.py"
LAYOUT = replace(
    MOE_TP2_EP2,
    name="moe-tp2-dp2-ep2-buffers",
    extra=(
        *MOE_TP2_EP2.extra,
        "--tp-comm-overlap",
        *("--moe-token-dispatcher-type", "flex", "--moe-enable-deepep", "--moe-router-dtype", "fp32"),
    ),
)


class WithBuffers:
    """A `Program` of the harness."""

    environment = {  # noqa: RUF012
        "PYTHONPATH": os.pathsep.join(filter(None, [str(DEEP_EP), os.environ.get("PYTHONPATH")]))
    }

    def __call__(self, job: Job) -> list[str]:
        return [str(SCRIPT), str(prepare.megatron_lm() / "pretrain_gpt.py"), *harness.training(job)]


@pytest.mark.integration
def test_buffers_between_ranks_are_made_anew(tmp_path: Path) -> None:
    """The stand-ins raise where a member is gone, has another buffer, or takes a buffer down alone."""
    program = WithBuffers()
    faults = ["rank=3,step=4,phase=backward,kind=sigkill", "rank=0,step=6,phase=forward,kind=exception"]
    baseline = baselines(keeping.root(), program=program)(LAYOUT)
    trains_on(online(tmp_path, LAYOUT, faults, program=program), baseline, incidents=2)
