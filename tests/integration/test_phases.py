"""A failure in any phase of a step: the newest finished step is saved, and all processes end.

`test_online.py` kills ranks in each phase and recovers, `test_layouts.py` kills rank 1 in the update; both
compare the checkpoints in the same way. `python -m tests.integration.matrix` has each phase in each layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import DP2, DP4, job_in
from tests.faults.scenario import BaselineOf, survives

# What is saved when a rank fails in step 6. Before the norm no rank can be at the door; behind the barrier
# every rank is. Between them the rank of the other instance may be at the door already, with all that the
# step needs: then it is saved.
SAVED = {
    "forward": {5},
    "reduction": {5},
    "door-before": {5, 6},
    "update": {6},
    "gather": {6},
    "between": {6},
}


@pytest.mark.parametrize(
    ("rank", "phase", "kind"),
    [
        (1, "door-before", "sigkill"),
        # Another rank writes what is the same on all.
        (0, "reduction", "sigkill"),
        (0, "gather", "sigkill"),
        (0, "forward", "exception"),
        # Inside the update the state is that of no step, and at the door the rank will not go through.
        (1, "door-before", "exception"),
        (1, "update", "exception"),
        (1, "gather", "exception"),
        (1, "between", "exception"),
    ],
)
def test_a_rank_fails(rank: int, phase: str, kind: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = job_in(tmp_path, DP2, faults=[f"rank={rank},step=6,phase={phase},kind={kind}"])
    code, cause = (137, "was ended by SIGKILL") if kind == "sigkill" else (1, "raised InjectedError")
    result = survives(job, baseline_of(DP2), code=code, saved=SAVED[phase])
    assert result.last_line.startswith(f"[ttp] rank {rank} {cause}")


def test_two_ranks_of_different_shards_at_once(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = job_in(tmp_path, DP4, faults=["rank=0,step=6,phase=backward,kind=sigkill,also=3"])
    survives(job, baseline_of(DP4), code=137, saved={5})
