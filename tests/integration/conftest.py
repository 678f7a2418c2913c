"""Each of these tests trains Megatron-LM once or more often, with faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import harness

# One test is two or three jobs, each of which ends itself by `harness.JOB_TIMEOUT_S`.
TIMEOUT_S = 1200
# Here every process is started as a user starts it; elsewhere workers are forks (`tests/faults/warm.py`).
COLD = ("test_undisturbed", "test_refusals")


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.stem in COLD:
        monkeypatch.setenv(harness.COLD, "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
