"""MindIO's own SDK, where it is installed, for the tests that run on it."""

from __future__ import annotations

import importlib.util

import pytest

from tests.faults import harness

# Of an NPU, for the SDK alone.
_STANDIN = harness.ROOT / "tests/standins/plain"


def require() -> list[str]:
    """What has to be on the path of its jobs besides; the test is skipped where it is not there."""
    if importlib.util.find_spec("mindio_ttp") is None:
        pytest.skip("mindio_ttp is not installed: what drives it is not tested")
    return [] if importlib.util.find_spec("torch_npu") else [str(_STANDIN)]
