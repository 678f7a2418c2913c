"""Online recovery of one node's workers: whatever is lost, every step is that of the run that never failed.

Agent and controller are played (`tests/faults/online_agent.py`), over the real protocol, so that nothing but
the workers is to blame; `test_online.py` has the real ones.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults import harness, online_agent, outcome
from tests.faults.harness import ITERATIONS, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf
from tests.frameworks import record


def recovers(
    layout: Layout,
    tmp_path: Path,
    baseline_of: BaselineOf,
    *faults: str,
    steps: set[int],
    **environment: str,
) -> None:
    """The job goes on without a restart, and its last checkpoint is that of the baseline.

    Args:
        steps: the finished steps from which it may go on: 5 and 6, where the order to stop may come before
            the survivors' update. Going on from step 6, in which every fault here strikes, loses the
            framework's own line of that step: the call of the loop that writes it was left.
    """
    baseline = baseline_of(layout)
    job = Job(tmp_path / "job", layout, save=tmp_path / "save", faults=faults, environment={**environment})
    agent = online_agent.OnlineAgent(job)
    agent.run()
    (incident,) = agent.incidents
    step = int(incident.partition(",")[0].removeprefix("step "))
    assert step in steps, incident
    logged = set(range(1, ITERATIONS + 1)) - ({6} if step == 6 else set())
    ended = SimpleNamespace(records=record.read(job.out / "record"))
    outcome.assert_same_training(ended, baseline.records, steps=logged)  # type: ignore[arg-type]
    name = f"iter_{ITERATIONS:07d}"
    assert differences(tmp_path / "save" / name, baseline.checkpoints / name) == []


@pytest.mark.parametrize(
    ("rank", "phase", "steps"),
    [(0, "door-before", {5, 6}), (3, "gather", {6})],
)
def test_a_rank_is_killed(
    rank: int, phase: str, steps: set[int], tmp_path: Path, baseline_of: BaselineOf
) -> None:
    fault = f"rank={rank},step=6,phase={phase},kind=sigkill"
    recovers(harness.DP4, tmp_path, baseline_of, fault, steps=steps)


def test_an_exception_lets_all_make_the_step_again(tmp_path: Path, baseline_of: BaselineOf) -> None:
    recovers(harness.DP4, tmp_path, baseline_of, "rank=2,step=6,phase=reduction,kind=exception", steps={5})


# Those that test_online.py does not have.
LAYOUTS = (
    harness.VPP2_DP2,
    harness.MOE_EP2_MIRROR,
    harness.DP2_OVERLAP,
    harness.DP2_FP16,
    harness.DP2_FP32,
    harness.DP2_WHOLE,
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout(layout: Layout, tmp_path: Path, baseline_of: BaselineOf) -> None:
    recovers(layout, tmp_path, baseline_of, "rank=1,step=6,phase=backward,kind=sigkill", steps={5})


def test_with_a_local_copy(tmp_path: Path, baseline_of: BaselineOf) -> None:
    fault = "rank=1,step=6,phase=backward,kind=sigkill"
    recovers(harness.DP4, tmp_path, baseline_of, fault, steps={5}, TTP_LOCAL_COPY="True")


def test_two_faults_one_after_the_other(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The second one strikes the rank that gave its state to the first one's newcomer."""
    baseline = baseline_of(harness.DP4)
    job = Job(
        tmp_path / "job",
        harness.DP4,
        save=tmp_path / "save",
        faults=["rank=1,step=4,phase=backward,kind=sigkill", "rank=3,step=6,phase=backward,kind=sigkill"],
    )
    agent = online_agent.OnlineAgent(job)
    agent.run()
    assert agent.incidents == ["step 3, replaced [1]", "step 5, replaced [3]"]
    ended = SimpleNamespace(records=record.read(job.out / "record"))
    outcome.assert_same_training(ended, baseline.records)  # type: ignore[arg-type]
