"""Incidents are marked in the framework's own log, among its curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults import harness
from tests.faults.harness import DP2, ITERATIONS, Layout, job_in
from tests.integration.test_online import online


def test_tensorboard(tmp_path: Path) -> None:
    """One fault strikes the rank that writes the log and is recovered online; of two faults at step 6 the
    last is marked.

    The first fault makes all ranks repeat the step; the second restarts all before the step is finished.
    """
    folder = tmp_path / "curves"
    layout = replace(DP2, name="dp2-tensorboard", extra=("--tensorboard-dir", str(folder)))
    twice = "rank=0,step=6,phase=backward,kind=exception"
    result = harness.run(
        online(tmp_path, layout, ["rank=1,step=4,phase=backward,kind=sigkill", twice, twice], restarts=1),
        code=0,
    )
    assert "restart 1 of 1: from step 5, 0 steps lost" in result.log
    written = EventAccumulator(str(folder)).Reload()
    points = written.Scalars("ttp/incident")
    assert [(point.step, point.value) for point in points] == [(4, 1.0), (6, 1.0)]
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in written.Tensors("ttp/incident_line/text_summary")
    ]
    assert "rank 1 was ended by SIGKILL; replaced by pid " in texts[0]
    assert "rank 0 raised " in texts[1]
    # A thread of TensorBoard's writes them: those of step 3 may be in its queue at the kill.
    steps = {point.step for point in written.Scalars("lm loss")}
    assert steps | {3} == set(range(1, ITERATIONS + 1))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B's own client and service, which write to a folder and speak with no server."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")


def with_wandb(folder: Path) -> Layout:
    """Return a layout whose rank 1 also writes its TensorBoard values to W&B."""
    wandb = ("--wandb-project", "tests", "--wandb-exp-name", "marks", "--wandb-save-dir", str(folder))
    return replace(DP2, name="dp2-wandb", extra=("--tensorboard-dir", str(folder / "curves"), *wandb))


@pytest.mark.usefixtures("offline")
def test_wandb_after_online_recoveries(tmp_path: Path) -> None:
    """The rank that writes the log is killed; its new process has a new run, and survives a fault."""
    from tests import wandb_file

    faults = [
        "rank=1,step=4,phase=backward,kind=sigkill",
        "rank=0,step=6,phase=backward,kind=exception",
    ]
    harness.run(online(tmp_path, with_wandb(tmp_path), faults), code=0)
    first, second = wandb_file.runs(tmp_path)
    assert first.exit_code is None  # its service died with the rank
    assert second.exit_code == 0
    assert list(second.steps) == list(range(4, ITERATIONS + 1))
    marked = {step: values for step, values in second.steps.items() if "ttp/incident" in values}
    assert [(step, values["ttp/incident"]) for step, values in marked.items()] == [(4, 1), (6, 1)]
    assert "rank 1 was ended by SIGKILL; replaced by pid " in marked[4]["ttp/incident_line"]
    assert "rank 0 raised " in marked[6]["ttp/incident_line"]
    assert all("lm loss" in values for values in second.steps.values())


@pytest.mark.usefixtures("offline")
def test_wandb_after_a_restart(tmp_path: Path) -> None:
    """The rank that writes the log survives and is ended in a collective: its run has every step."""
    from tests import wandb_file

    harness.run(
        job_in(
            tmp_path, with_wandb(tmp_path), faults=["rank=0,step=4,phase=backward,kind=sigkill"], restarts=1
        ),
        code=0,
    )
    first, second = wandb_file.runs(tmp_path)
    assert (list(first.steps), first.exit_code) == ([1, 2, 3], 1)
    assert (list(second.steps), second.exit_code) == (list(range(4, ITERATIONS + 1)), 0)
    (marked,) = [step for step, values in second.steps.items() if "ttp/incident" in values]
    assert marked == 4
    assert "rank 0 was ended by SIGKILL" in second.steps[4]["ttp/incident_line"]
