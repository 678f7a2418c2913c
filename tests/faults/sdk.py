"""MindIO's own SDK, for tests with the SDK."""

from __future__ import annotations

import importlib.util

import pytest

from tests.faults import harness

# A stand-in for an NPU, for the SDK alone.
_STANDIN = harness.ROOT / "tests/standins/plain"


def require() -> list[str]:
    """Return further paths for PYTHONPATH of the SDK's jobs; skip the test if the SDK is not installed."""
    if importlib.util.find_spec("mindio_ttp") is None:
        pytest.skip("mindio_ttp is not installed: the engine mindio is not tested")
    return [] if importlib.util.find_spec("torch_npu") else [str(_STANDIN)]
