"""The scripts in benchmarks/ still fit the code that they measure. What they measure is not tested."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[a-z]*.py"))


def _run(*command: str) -> str:
    process = subprocess.run(
        [sys.executable, *command],
        cwd=BENCHMARKS.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_it_says_what_it_takes(script: str) -> None:
    assert "usage" in _run(f"benchmarks/{script}", "--help")


def test_board_and_door_are_measured(tmp_path: Path) -> None:
    assert "door" in _run("benchmarks/board_door.py", "--batches", "20")
