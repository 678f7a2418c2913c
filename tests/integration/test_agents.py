"""The agent itself is ended: nothing of the job stays, and no checkpoint is harmed.

`test_online_nodes.py` kills the agent of another node.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, DP2_LOADERS, Job, Layout, job_in
from tests.faults.scenario import BaselineOf, assert_last_words, survives
from tests.integration.test_formats import DIST

# torch's agent waits 30 s for workers that do not go.
AT_ONCE_S = 20.0


@pytest.mark.parametrize(
    ("kind", "code", "layout"),
    [("agent-sigterm", 143, DP2), ("agent-sigint", 130, DP2), ("tree-sigterm", 143, DP2_LOADERS)],
    ids=["sigterm", "ctrl-c", "sigterm-to-all"],
)
def test_the_job_gets_a_termination_signal(
    kind: str, code: int, layout: Layout, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The job saves and ends, even with restarts left; data loaders have their own processes."""
    job = job_in(tmp_path, layout, restarts=1, faults=[f"rank=1,step=5,phase=forward,kind={kind}"])
    result = survives(job, baseline_of(layout), code=code, saved={4, 5})
    assert "was told to end by SIG" in result.last_line
    assert all(line["restart"] == 0 for lines in result.records.values() for line in lines)
    assert result.seconds_after_the_fault < AT_ONCE_S


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A stopped rank is waited for, and would not hear SIGTERM either."""
    job = job_in(
        tmp_path,
        DP2,
        save_interval=3,
        faults=[
            "rank=0,step=5,phase=data,kind=sigstop",
            "rank=1,step=5,phase=forward,kind=agent-sigint-twice,after=0",
        ],
    )
    result = harness.run(job, code=130)
    assert job.save is not None
    assert result.last_line == (
        f"[ttp] ended by SIGINT, and the workers with it; the newest checkpoint in {job.save} is step 3"
    )
    assert_last_words(job.save, 3, baseline_of(DP2))
    assert result.seconds_after_the_fault < AT_ONCE_S


def test_the_agent_is_killed(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The workers end at once with the agent, as do the processes that they started for torch_dist saves."""
    baseline = baseline_of(DIST)
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DIST,
        save=save,
        save_interval=3,
        faults=["rank=1,step=5,phase=forward,kind=agent-sigkill"],
    )
    result = harness.run(job)
    assert result.code != 0
    assert "Traceback" not in result.last_line
    assert_last_words(save, 3, baseline)
    assert outcome.steps_in(save) == [3]
    assert result.seconds_after_the_fault < AT_ONCE_S
