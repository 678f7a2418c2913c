"""The script that runs the tests of attacks and odd machines, and writes their table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

@pytest.mark.robustness("B10", "a job is started | twice", "the second is refused")
def test_second(): ...

@pytest.mark.robustness("A2", "two tests", "both pass")
@pytest.mark.parametrize("value", [1, 2])
def test_both(value):
    assert value == 1, "not two"

@pytest.mark.robustness("A1", "no such machine", "nothing")
def test_skipped():
    pytest.skip("no machine here")

def test_unmarked():
    raise AssertionError("it is not run")
"""


def _run(folder: Path, *options: str) -> tuple[int, str]:
    (folder / "test_tiny.py").write_text(TESTS)
    command = [sys.executable, "-m", "tests.robustness", "--write", str(folder / "page.md")]
    command += ["--results", str(folder / "results.json"), *options, str(folder / "test_tiny.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    page = folder / "page.md"
    return ended.returncode, page.read_text() if page.exists() else ended.stdout + ended.stderr


def _rows(page: str) -> list[list[str]]:
    lines = [line.replace("\\|", "¦") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")][:4] for line in lines[2:]]


def test_each_case_is_a_row_and_parts_are_kept(tmp_path: Path) -> None:
    code, page = _run(tmp_path, "-k", "second or skipped")
    assert code == 0, page
    assert _rows(page) == [
        ["A1", "no such machine", "nothing", "not run here: no machine here"],
        ["A2", "two tests", "both pass", "not run"],
        ["B10", "a job is started ¦ twice", "the second is refused", "passed"],
    ]
    code, page = _run(tmp_path, "-k", "both")
    assert code == 1, page
    assert [row[3] for row in _rows(page)] == ["not run here: no machine here", "failed", "passed"]
    assert "1 of 3 hold." in page
    assert "python -m tests.robustness --write" in page


def test_outcomes_of_a_run_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_tiny.py").write_text(TESTS)
    results = tmp_path / "results.xml"
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", str(ROOT)]
    command += [f"--junitxml={results}", str(tmp_path / "test_tiny.py")]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False)
    code, page = _run(tmp_path, "--junit", str(results))
    assert code == 0, page
    assert [row[3] for row in _rows(page)] == ["not run here: no machine here", "failed", "passed"]


def test_a_marker_without_its_words_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text(
        "import pytest\n@pytest.mark.robustness('three')\ndef test_it(): ...\n"
    )
    code, said = _run(tmp_path, str(tmp_path / "test_bad.py"))
    assert code == 4
    assert "must be an area like B3, a case, what must hold" in said
