"""A plug-in for another framework: installed by pip, loaded by its entry point."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks import prepare
from tests.waiting import captured

pytestmark = pytest.mark.integration

SOURCE = Path(__file__).resolve().parents[1] / "frameworks/lab"


def install(source: Path, target: Path) -> Path:
    """Install a copy of the plug-in in `source` into the folder `target`."""
    copy = target.with_name(f"{target.name}-source")
    shutil.copytree(source, copy)  # the build leaves files beside what it builds
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(copy)], check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(SOURCE, tmp_path_factory.mktemp("plug-in") / "site")


def report(installed: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(prepare.megatron_core())])
    return captured(
        [sys.executable, "-m", "adaptor", "report"],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": path, "TTP_DEVICE": "cpu"},
    )


def test_its_patches_are_applied_and_reported(installed: Path) -> None:
    completed = report(installed)
    rows = [line.split() for line in completed.stdout.splitlines() if line.startswith("lab:")]
    assert [row[:3] for row in rows] == [
        ["lab:train", "lab", "applied"],
        ["lab:train_step", "lab", "applied"],
    ]
    assert "unit lab: lab 1.0 is tested (>=1.0,<2)" in completed.stdout


def test_one_that_cannot_be_loaded_is_an_error_in_one_line(installed: Path, tmp_path: Path) -> None:
    installed = Path(shutil.copytree(installed, tmp_path / "site"))
    (installed / "lab_adaptor.py").write_text("import engine_that_is_not_here\n")
    completed = report(installed)
    assert completed.returncode != 0
    (line,) = completed.stderr.splitlines()
    assert "the plug-in lab of lab-adaptor cannot be loaded" in line
    assert "engine_that_is_not_here" in line
