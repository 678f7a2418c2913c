"""Each of these tests trains Megatron-LM once or more often, with faults."""

from __future__ import annotations

import pytest

from tests.faults import harness

# One test is two or three jobs, each of which ends itself by `harness.JOB_TIMEOUT_S`.
TIMEOUT_S = 1200


@pytest.fixture(autouse=True)
def _cold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("cold"):
        monkeypatch.setenv(harness.COLD, "1")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.integration)
    item.add_marker(pytest.mark.timeout(TIMEOUT_S))
