"""Two agents, on one machine, each with two of the four workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import DP4, Job
from tests.faults.scenario import BaselineOf, ends, restarts

RANKS = pytest.mark.parametrize("rank", [1, 2], ids=["node0", "node1"])


@RANKS
def test_both_agents_end_with_the_code_of_the_failed_worker(
    rank: int, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        nodes=2,
        faults=[f"rank={rank},step=6,phase=update,kind=sigkill"],
    )
    ends(job, baseline_of(DP4), code=137, saved={6})


@RANKS
def test_both_agents_restart_together(rank: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        nodes=2,
        restarts=1,
        faults=[f"rank={rank},step=6,phase=backward,kind=sigkill"],
    )
    restarts(job, baseline_of(DP4), saved={5})
