"""A fault while the last words are written: whoever is left saves the same step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.faults.harness import DP4, Ended, job_in
from tests.faults.scenario import BaselineOf, ends, survives

FIRST = "rank=3,step=6,phase=backward,kind=sigkill"


def assert_blamed(result: Ended, rank: int) -> None:
    """Verdict, line and report name `rank`; torch and the survivors have nothing to say beside them."""
    assert result.last_line.startswith(f"[ttp] rank {rank} ")
    incident = rf"\[ttp\] \S+Z incident 1, rank {rank} \(pid \d+, host \S+\), after step 5, report (/\S+)"
    (match,) = filter(None, (re.fullmatch(incident, line) for line in result.said))
    report = json.loads(Path(match[1]).read_text())
    assert report["blamed"] == rank
    assert "GLHF" not in result.log
    assert "failed (exitcode" not in result.log


@pytest.mark.parametrize(
    "second",
    [
        "rank=0,phase=dump-write,kind=sigkill",
        "rank=0,phase=dump-write,kind=exception",
    ],
    ids=["killed-while-writing", "exception-while-writing"],
)
def test_the_writer_fails(second: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """`test_nodes.py` kills the agent of a writer before it writes."""
    survives(job_in(tmp_path, DP4, faults=[FIRST, second]), baseline_of(DP4), code=137, saved={5})


@pytest.mark.robustness(
    "A6",
    "two ranks are killed, one after the other",
    "the first is named by the verdict, its line and the report",
)
@pytest.mark.parametrize("phase", ["dump", "dump-write"], ids=["at-once", "while-it-writes-its-shards"])
def test_a_holder_that_does_not_make_the_files_is_killed(
    phase: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Ranks 0 and 1 are chosen for the two shards, and rank 3 stands in for rank 1."""
    faults = ["rank=2,step=6,phase=backward,kind=sigkill", f"rank=1,phase={phase},kind=sigkill"]
    result = survives(job_in(tmp_path, DP4, faults=faults), baseline_of(DP4), code=137, saved={5})
    assert_blamed(result, 2)


def test_the_writer_is_stopped(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The writer is stopped after its selection and does not answer any more."""
    job = job_in(
        tmp_path, DP4, options=["--ttp-ot", "20"], faults=[FIRST, "rank=0,phase=dump-gather,kind=sigstop"]
    )
    ends(job, baseline_of(DP4), code=137, saved={5})
