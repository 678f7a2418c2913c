"""A hanging job: detected by boards without progress; the rank is named, the job saved and ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, DP2_LOADERS, DP4, PP2_DP2, Layout, job_in
from tests.faults.scenario import BaselineOf, restarts, survives

# Steps take a tenth of a second here; a machine with much other work must not make a hang of one.
HANG = ["--ttp-hang", "8"]
DP2_EVALUATES = Layout(
    "dp2-evaluates", 2, batch=4, extra=("--eval-interval", "2", "--eval-iters", "1", "--split", "90,10,0")
)


@pytest.mark.parametrize(
    ("layout", "rank", "phase", "kind", "saved", "cause"),
    [
        (DP2, 1, "data", "deadlock", {5}, "rank 1 stands still, others wait; wait (threading.py:"),
        (
            DP4,
            2,
            "forward",
            "unanswered",
            {5},
            "rank 2 waits in another call than most ranks; recv (distributed_c10d.py:",
        ),
        (DP2, 1, "backward", "sigstop", {5}, "rank 1 does not answer"),
        (DP2, 0, "forward", "holds-the-gil", {5}, "rank 0 does not answer"),
        # Others wait for it when they have ended the step, as they sum up statistics.
        (PP2_DP2, 2, "door-after", "deadlock", {6}, "rank 2 stands still, others wait; wait (threading.py:"),
    ],
    ids=["deadlock", "unanswered", "stopped", "interpreter lock", "inside the update"],
)
def test_a_rank_hangs(
    layout: Layout,
    rank: int,
    phase: str,
    kind: str,
    saved: set[int],
    cause: str,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    job = job_in(tmp_path, layout, options=HANG, faults=[f"rank={rank},step=6,phase={phase},kind={kind}"])
    result = survives(job, baseline_of(layout), code=1, saved=saved)
    assert "nothing has moved for " in result.last_line
    assert cause in result.last_line
    stacks = {path.name for path in (job.out / "logs").glob("stacks-*/*")}
    ranks = range(layout.processes)
    assert stacks >= {f"rank{rank}.txt" for rank in ranks}
    (incident,) = (job.out / "logs").glob("*/incidents/*.json")
    missed = json.loads(incident.read_text())["collectives"]
    if kind in ("sigstop", "holds-the-gil"):
        assert missed[0].startswith(f"rank {rank} does not answer: ")
    else:
        assert missed
        assert all(line.startswith(f"rank {rank} misses ") for line in missed), missed
        assert stacks >= {"collectives.txt", *(f"rank{rank}.collectives.json" for rank in ranks)}


def test_data_loaders_that_never_return(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Batches that the loaders fetched before the fault are used first."""
    job = job_in(
        tmp_path, DP2_LOADERS, options=HANG, faults=["rank=1,step=5,phase=data,kind=loaders-stopped"]
    )
    result = survives(job, baseline_of(DP2_LOADERS), code=1, saved={4, 5, 6, 7})
    assert "rank 1 stands still, others wait; " in result.last_line


def test_a_job_that_hangs_goes_on(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = job_in(
        tmp_path, DP2, restarts=1, options=HANG, faults=["rank=1,step=6,phase=backward,kind=deadlock"]
    )
    restarts(job, baseline_of(DP2), saved={5})


@pytest.mark.robustness(
    "A2", "a rank hangs in an evaluation or a save, others wait in the next step", "a hang, by its own limit"
)
def test_a_rank_hangs_in_an_evaluation(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """In the third one: the first has no limit, and is the measure of the others."""
    job = job_in(
        tmp_path, DP2_EVALUATES, options=HANG, faults=["rank=1,step=6,phase=evaluation,kind=deadlock"]
    )
    result = survives(job, baseline_of(DP2_EVALUATES), code=1, saved={6})
    assert "rank 1 stands still, others wait; wait (threading.py:" in result.last_line
    assert "[ttp] protected from step 1 (split; any 1 rank)" in result.said


def test_long_pauses_outside_of_steps_are_no_hang(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Start-up, and a pause between two steps, are longer than the limit."""
    job = job_in(
        tmp_path, DP2, options=["--ttp-hang", "6"], faults=["rank=1,step=5,phase=between,kind=pause"]
    )
    result = harness.run(job, code=0)
    assert not list((job.out / "logs").glob("*/incidents/*"))
    outcome.assert_same_training(result, baseline_of(DP2).records)
