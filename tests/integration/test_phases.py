"""Wherever in a step a process fails, the newest finished step is saved, and all end.

`test_online.py` kills rank 1 in each phase and goes on; what is saved there is compared the same way. Here
are the two phases in which it is decided late which step that is.
`python -m tests.integration.matrix` has each phase in each layout.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import DP4, Job
from tests.faults.scenario import BaselineOf, survives

# What is saved when a rank is killed in step 6. Before the norm no rank can be at the door; behind the
# barrier every rank is. Between them the ranks of the other instance may be at the door already, with all
# that the step needs: then it is saved.
SAVED = {
    "reduction": {5},
    "door-before": {5, 6},
    "update": {6},
    "gather": {6},
    "between": {6},
}


def _survives_a_kill(rank: int, phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        faults=[f"rank={rank},step=6,phase={phase},kind=sigkill"],
    )
    survives(job, baseline_of(DP4), code=137, saved=SAVED[phase])


@pytest.mark.parametrize("phase", ["door-before", "update"])
def test_rank_1_is_killed(phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    _survives_a_kill(1, phase, tmp_path, baseline_of)


@pytest.mark.parametrize("phase", ["reduction", "gather"])
def test_rank_0_is_killed(phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Before the update and in it: another rank writes what is the same on all."""
    _survives_a_kill(0, phase, tmp_path, baseline_of)


@pytest.mark.parametrize("phase", ["door-before", "update", "gather", "between"])
def test_an_exception_in_rank_1(phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Inside the update its state is that of no step, and at the door it will not go through."""
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        faults=[f"rank=1,step=6,phase={phase},kind=exception"],
    )
    survives(job, baseline_of(DP4), code=1, saved=SAVED[phase])
