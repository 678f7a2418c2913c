"""ModelLink's loop is recovered online: its patches on a small framework of our own (tests/frameworks/small).

ModelLink itself is trained by hand: `python -m tests.frameworks.by_hand_modellink`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.harness import Layout
from tests.frameworks.checks import RECOVERED
from tests.frameworks.modellink_bench import Bench, Check
from tests.integration.test_modellink import DP3, DP4, Small

DP2 = Layout("small-dp2", 2)
WHOLE = Layout("small-dp2-whole", 2, distributed_optimizer=False)
# Behind step 5, and at the end.
EVALUATED = replace(DP3, name="small-dp3-evaluated", extra=("--eval-interval", "5", "--eval-iters", "2"))


def recovers(tmp_path: Path, layout: Layout, *faults: str, spares: int = 0, saves: int = 1000) -> str:
    """Assert that a job continues bitwise after each fault; return its kind of replicas."""
    check = Check(layout, spec=" ".join(faults), restarts=1, online=True, spares=spares, saves=saves)
    replica, result = Bench(Small(), tmp_path).run(check, "job")
    assert result == RECOVERED
    return replica


@pytest.mark.integration
def test_two_deaths_with_split(tmp_path: Path) -> None:
    """The second death is in the update, which others have made: the log line is written after the
    recovery.
    """
    faults = "rank=0,step=4,phase=backward,kind=sigkill", "rank=3,step=6,phase=update,kind=sigkill"
    assert recovers(tmp_path, DP4, *faults) == "split (auto)"


@pytest.mark.integration
def test_two_deaths_with_mirror(tmp_path: Path) -> None:
    """The last rank, which writes the log, has made step 4 and dies before it writes the line."""
    faults = "rank=2,step=4,phase=between,kind=sigkill", "rank=1,step=6,phase=gather,kind=sigkill"
    assert recovers(tmp_path, DP3, *faults) == "mirror (auto)"


@pytest.mark.integration
def test_a_spare_takes_the_place_of_a_rank_with_a_whole_optimizer(tmp_path: Path) -> None:
    fault = "rank=1,step=6,phase=backward,kind=sigkill-beside-a-spare"
    assert recovers(tmp_path, WHOLE, fault, spares=1) == "none needed"


@pytest.mark.integration
def test_exceptions_replace_nobody(tmp_path: Path) -> None:
    faults = "rank=1,step=4,phase=backward,kind=exception", "rank=0,step=6,phase=door-before,kind=exception"
    recovers(tmp_path, DP2, *faults)


@pytest.mark.integration
def test_a_save_and_an_evaluation_that_were_interrupted_are_made_again(tmp_path: Path) -> None:
    faults = "rank=2,step=4,phase=save,kind=exception", "rank=1,step=5,phase=evaluation,kind=sigkill"
    recovers(tmp_path, EVALUATED, *faults, saves=4)


@pytest.mark.integration
def test_a_job_that_was_to_exit_behind_the_step_exits(tmp_path: Path) -> None:
    layout = replace(DP3, name="small-dp3-exit", extra=("--exit-interval", "8"))
    recovers(tmp_path, layout, "rank=0,step=8,phase=gather,kind=sigkill")


@pytest.mark.integration
def test_averages_are_those_of_the_whole_interval(tmp_path: Path) -> None:
    """Of steps 4 to 6: the rank that writes the log and has summed the losses dies after step 5."""
    layout = replace(DP3, name="small-dp3-interval", extra=("--log-interval", "3"))
    recovers(tmp_path, layout, "rank=2,step=5,phase=between,kind=sigkill")


@pytest.mark.integration
def test_a_loop_that_cannot_be_called_again_reports_the_reason_and_restarts(tmp_path: Path) -> None:
    layout = replace(DP3, name="small-dp3-buckets", extra=("--DDP-impl", "torch"))
    fault = "rank=1,step=4,phase=backward,kind=sigkill"
    _, result = Bench(Small(), tmp_path).run(Check(layout, "", fault, 3, restarts=1, online=True), "job")
    assert result.startswith("`online recovery: no` at the start; started again from step 3 by itself")
    text = (tmp_path / "job" / "agent0.log").read_text()
    reason = "--DDP-impl torch keeps work of a step in torch's own buckets"
    assert text.count(f"[ttp] online recovery: no ({reason}); a fault restarts all ranks") == 1
