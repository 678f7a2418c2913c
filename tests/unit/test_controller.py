"""The controller, by golden traces: tests/unit/controller_traces, in the language of `traces.py`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.traces import replay

TRACES = sorted((Path(__file__).parent / "controller_traces").glob("*.txt"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    expected = path.read_text()
    now = replay(expected)
    if os.environ.get("UPDATE_TRACES"):
        path.write_text(now)
    assert now == expected
