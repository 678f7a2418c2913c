"""ModelLink's shape: its patches on a small framework of our own (tests/frameworks/small).

ModelLink itself is trained by hand: `python -m tests.frameworks.by_hand_modellink`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.harness import ITERATIONS, Job, Layout, job_in
from tests.frameworks.by_hand_modellink import BREAKS_OFF, LOCAL_COPY, killed
from tests.frameworks.modellink_bench import Bench, Check

SMALL = Path(__file__).resolve().parents[1] / "frameworks" / "small"
DP4 = Layout("small-dp4", 4)
DP3 = Layout("small-dp3", 3)


class Small:
    """A `Program` of the harness."""

    environment = {  # noqa: RUF012
        "PYTHONPATH": os.pathsep.join(filter(None, [str(SMALL), os.environ.get("PYTHONPATH")]))
    }

    def __call__(self, job: Job) -> list[str]:
        sizes = ["--global-batch-size", str(2 * job.layout.processes), "--train-iters", str(ITERATIONS)]
        folders = [
            *(() if job.save is None else ("--save", str(job.save))),
            *(() if job.load is None else ("--load", str(job.load))),
        ]
        distributed = () if not job.layout.distributed_optimizer else ("--use-distributed-optimizer",)
        interval = ["--save-interval", str(job.save_interval)]
        options = [*distributed, *job.layout.extra, *job.arguments]
        return [str(SMALL / "pretrain.py"), *sizes, *folders, *interval, *options]


@pytest.mark.integration
def test_a_half_saves_for_the_other(tmp_path: Path) -> None:
    """Split: rank 3 dies in the update of step 4, which rank 1 also makes.

    Both halves load the checkpoint again.
    """
    check = Check(DP4, *killed(3, 4, "update"), 4, restarts=1)
    replica, result = Bench(Small(), tmp_path).run(check, "job")
    assert replica == "split (auto)"
    assert result.startswith("started again from step 4 by itself")


@pytest.mark.integration
def test_three_ranks_go_back_to_their_copies(tmp_path: Path) -> None:
    """Mirror with a local copy: the framework loads the last words like its own checkpoint."""
    check = Check(DP3, *BREAKS_OFF, 5, options=LOCAL_COPY)
    replica, result = Bench(Small(), tmp_path).run(check, "job")
    assert replica == "mirror (auto)"
    assert result.startswith("step 5 saved as the framework saves it")


@pytest.mark.integration
def test_a_local_copy_of_a_whole_optimizer_is_refused(tmp_path: Path) -> None:
    layout = Layout("small-dp2", 2, distributed_optimizer=False)
    result = harness.run(job_in(tmp_path, layout, arguments=LOCAL_COPY, program=Small()), code=2)
    assert result.last_line == (
        "ttprun: error: --local-copy-os (TTP_LOCAL_COPY) is given without --use-distributed-optimizer: "
        "add --use-distributed-optimizer, or leave out --local-copy-os"
    )
    assert "Traceback" not in result.log
    assert not any(result.records.values())
