"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from adaptor import context, output, plug_ins
from tests.forked_workers import pytest_collection_modifyitems, pytest_xdist_setupnodes
from tests.timing import pytest_configure, pytest_runtest_makereport, pytest_runtest_setup

if TYPE_CHECKING:
    from tests.faults.scenario import BaselineOf

__all__ = [
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_runtest_makereport",
    "pytest_runtest_setup",
    "pytest_xdist_setupnodes",
]

ROOT = Path(__file__).resolve().parents[1]

# What a platform gives the processes that it starts (launchers/platforms/), and torchrun's own variables.
_OF_A_PLATFORM = (
    *("MA_", "VC_", "VK_", "SLURM_", "OMPI_", "PET_", "MINDX_", "RANK", "ASCEND_DEVICE_ID"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "MASTER_"),
)
# Tests start jobs of their own, also where a platform has started pytest.
for _name in [name for name in os.environ if name.startswith(_OF_A_PLATFORM)]:
    del os.environ[_name]

# Most tests expect that a fault starts all ranks again; those of online recovery ask for it.
os.environ["TTP_ONLINE"] = "0"


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collections, and let torch use a single thread.

    More tests run at the same time than there are cores, and threads that wait for each other would spin.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Stop at once if the installation is older than the plug-ins in pyproject.toml.

    torch is imported in each test process, where its warnings are no errors; not in the process that only
    starts the workers of pytest-xdist, which wait for their starter.
    """
    declared = (ROOT / "pyproject.toml").read_text()
    for group in (plug_ins.DEVICES, plug_ins.ENGINES, plug_ins.FORMATS):
        for line in declared.partition(f'"{group}"]\n')[2].partition("\n\n")[0].splitlines():
            name, _, value = line.partition(" = ")
            if (name, value.strip('"')) not in [
                (entry_point.name, entry_point.value) for entry_point in plug_ins.declared(group)
            ]:
                pytest.exit(
                    f"{name} of {group} is not installed: the installation is older than pyproject.toml; run"
                    f" {sys.executable} -m pip install --no-deps --no-build-isolation -e {ROOT}",
                    returncode=pytest.ExitCode.USAGE_ERROR,
                )
    if hasattr(session.config, "workerinput") or getattr(session.config.option, "dist", "no") == "no":
        import torch  # noqa: F401


@pytest.fixture(scope="session")
def baseline_of() -> BaselineOf:
    """Train a layout when it is first asked for; runs are kept in .cache, or in TTP_TEST_BASELINES."""
    from tests.faults import keeping, scenario

    return scenario.baselines(keeping.root())


@pytest.fixture(autouse=True)
def _its_own_context() -> None:
    """Let each test read settings and make the parts of the process's context anew."""
    context.forget()


@pytest.fixture
def capsys(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    """Return pytest's own fixture, after waiting for lines that a thread writes (`adaptor.output`)."""
    return _drained(capsys, monkeypatch)


@pytest.fixture
def capfd(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> pytest.CaptureFixture[str]:
    """Return pytest's own fixture, like `capsys`, for output past Python's streams."""
    return _drained(capfd, monkeypatch)


def _drained(
    captured: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> pytest.CaptureFixture[str]:
    read = captured.readouterr

    def drained() -> object:
        assert output.drain(60.0), "what was told is not written"
        return read()

    monkeypatch.setattr(captured, "readouterr", drained)
    return captured
