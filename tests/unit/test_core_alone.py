"""An installation without the files of optional parts: `ttprun` starts workers, and every patch loads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import warm
from tests.unit import source_tree
from tests.unit.test_architecture import part_of

# The finder of an editable installation would find the deleted files in the checkout.
WITHOUT_THE_CHECKOUT = """\
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in getattr(finder, "__module__", "")]
"""
SCRIPT = """\
import os, sys
import adaptor, adaptor.library, adaptor.patches
for group in adaptor.patches.FILES:
    adaptor.patches.load(group)
from adaptor.launchers.agent import elastic_agent
print("parts", [name for name in sys.modules if name.startswith(("adaptor.store", "adaptor.operations"))])
print("rank", os.environ["RANK"], os.path.dirname(adaptor.__file__))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return installation(tmp_path / "site")


def installation(folder: Path, *parts: str) -> Path:
    """Copy the core, and these optional parts, into a folder for PYTHONPATH."""
    for module, path in source_tree.modules().items():
        if part_of(module) in (None, *parts):
            names = module.split(".")
            name = "__init__.py" if path.name == "__init__.py" else f"{names.pop()}.py"
            target = folder.joinpath(*names, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_CHECKOUT)
    return folder


def _run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = site.parent / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(site), "TTP_LOG_PATH": str(site.parent / "logs")}
    program = "from adaptor.launchers.cli.entry import main; raise SystemExit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "--standalone",
        "--nproc-per-node",
        "2",
        *arguments,
        str(script),
    ]
    return warm.run(command, cwd=site.parent, env=environment)


def test_a_job_starts_without_any_optional_part(site: Path) -> None:
    completed = _run(site)
    assert completed.returncode == 0, completed.stderr[-3000:]
    assert "parts []" in completed.stdout
    assert {f"rank {rank} {site / 'adaptor'}" for rank in (0, 1)} <= set(completed.stdout.splitlines())


def test_the_flag_of_a_missing_part_is_unknown(site: Path) -> None:
    completed = _run(site, "--ttp-store", "s3://bucket/run")
    assert completed.returncode == 2
    assert "there is no flag --ttp-store" in completed.stderr
