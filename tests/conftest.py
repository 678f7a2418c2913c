"""Fixtures of the tests that train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import harness
from tests.faults.scenario import Baseline, BaselineOf
from tests.frameworks import record


@pytest.fixture(scope="session")
def baseline_of(tmp_path_factory: pytest.TempPathFactory) -> BaselineOf:
    """Trains a layout when it is first asked for; TTP_TEST_BASELINES names a folder that keeps the runs."""
    kept = os.environ.get("TTP_TEST_BASELINES")
    root = Path(kept) if kept else tmp_path_factory.mktemp("baselines")

    def baseline(layout: harness.Layout) -> Baseline:
        out = root / layout.name
        if not (out / "done").exists():
            job = harness.Job(out, layout, launcher="torchrun", save=out / "checkpoints", save_interval=1)
            ended = harness.run(job)
            assert ended.code == 0, ended.log[-3000:]
            (out / "done").touch()
        return Baseline(record.read(out / "record"), out / "checkpoints")

    return baseline
