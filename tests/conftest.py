"""Fixtures of the tests that train."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults import scenario
from tests.faults.scenario import BaselineOf


@pytest.fixture(scope="session")
def baseline_of(tmp_path_factory: pytest.TempPathFactory) -> BaselineOf:
    """Trains a layout when it is first asked for; TTP_TEST_BASELINES names a folder that keeps the runs."""
    kept = os.environ.get("TTP_TEST_BASELINES")
    return scenario.baselines(Path(kept) if kept else tmp_path_factory.mktemp("baselines"))
