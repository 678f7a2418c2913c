"""The agent itself is ended: nothing of the job stays, and no checkpoint is harmed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, DP4, Job
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf, assert_last_words


@pytest.mark.parametrize(
    ("kind", "newest"), [("agent-sigterm", 3), ("agent-sigkill", 3), ("agent-sigint", 4)]
)
def test_the_agent_is_ended(kind: str, newest: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The workers are killed with it; only an interrupt is an exception in them, with last words."""
    baseline = baseline_of(DP2)
    save = tmp_path / "save"
    job = Job(
        tmp_path / "job",
        DP2,
        save=save,
        save_interval=3,
        faults=[f"rank=1,step=5,phase=forward,kind={kind}"],
    )
    ended = harness.run(job)
    assert ended.code != 0
    assert "Traceback" not in ended.last_line
    assert_last_words(save, newest, baseline)
    assert outcome.steps_in(save)[0] == 3
    assert differences(save / "iter_0000003", baseline.checkpoints / "iter_0000003") == []


def test_the_agent_of_another_node_is_killed(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Its workers go with it; the other node has the second copies of all that they held."""
    save = tmp_path / "save"
    fault = "rank=2,step=6,phase=backward,kind=agent-sigkill"
    ended = harness.run(Job(tmp_path / "job", DP4, save=save, nodes=2, faults=[fault]))
    assert ended.codes == (137, 137)
    assert outcome.steps_in(save) == [5]
    assert_last_words(save, 5, baseline_of(DP4))
