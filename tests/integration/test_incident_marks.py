"""Incidents are marked in the framework's own log, among its curves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.faults import harness
from tests.faults.harness import DP2
from tests.integration.test_online import online


def test_tensorboard(tmp_path: Path) -> None:
    """One strikes the rank that writes the log, and is recovered online; of two at step 6 the last is marked.

    The first of these lets all make the step again, the second restarts all before it is finished.
    """
    folder = tmp_path / "curves"
    layout = replace(DP2, name="dp2-tensorboard", extra=("--tensorboard-dir", str(folder)))
    twice = "rank=0,step=6,phase=backward,kind=exception"
    ended = harness.run(
        online(tmp_path, layout, ["rank=1,step=4,phase=backward,kind=sigkill", twice, twice], restarts=1)
    )
    assert set(ended.codes) == {0}, ended.log[-3000:]
    assert "restart 1 of 1: from step 5, 0 steps lost" in ended.log
    written = EventAccumulator(str(folder)).Reload()
    points = written.Scalars("ttp/incident")
    assert [(point.step, point.value) for point in points] == [(4, 1.0), (6, 1.0)]
    texts = [
        event.tensor_proto.string_val[0].decode()
        for event in written.Tensors("ttp/incident_line/text_summary")
    ]
    assert "rank 1 was ended by SIGKILL; replaced by pid " in texts[0]
    assert "rank 0 raised " in texts[1]
    assert {point.step for point in written.Scalars("lm loss")} == set(range(1, harness.ITERATIONS + 1))
