"""TTP_TORCHRUN=1: ttprun replaces the torchrun that a framework starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.unit.nodes import ROOT
from tests.waiting import captured

# A framework's command that starts torchrun: ms-swift's is a module, LLaMA-Factory's a program.
FRAMEWORK = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
SCRIPT = """
import os, sys
os.write(1, f"{sys.argv[1:]} {'TTP_AGENT' in os.environ} {os.environ.get('TTP_TORCHRUN')}\\n".encode())
"""
PROGRAMS = {
    "program": [str(Path(sys.executable).with_name("torchrun"))],
    "module": [sys.executable, "-m", "torch.distributed.run"],
}


def _run(folder: Path, program: str, value: str) -> subprocess.CompletedProcess[str]:
    declared = (
        (ROOT / "pyproject.toml").read_text().partition('[project.entry-points."torchrun.handlers"]')[2]
    )
    info = folder / "site/entry-1.dist-info"  # the tests' environment may be older than the declaration
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: entry\nVersion: 1\n")
    name, value_of_name = declared.split("\n")[1].split(" = ")
    entry = f"[torchrun.handlers]\n{name} = {value_of_name.strip(chr(34))}\n"
    (info / "entry_points.txt").write_text(entry)
    for file, text in {"framework.py": FRAMEWORK, "script.py": SCRIPT}.items():
        (folder / file).write_text(text)
    ports = free_ports(2)
    flags = ["--nnodes=1", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={ports[0]}"]
    environment = {name: text for name, text in os.environ.items() if "TTP" not in name}
    environment.update(
        PYTHONPATH=os.pathsep.join([str(ROOT), str(folder / "site")]),
        TTP_TORCHRUN=value,
        TTP_PORT=str(ports[1]),
        TTP_DEVICE="cpu",
    )
    return captured(
        [sys.executable, "framework.py", *PROGRAMS[program], *flags, "script.py", "--iters", "8"],
        cwd=folder,
        env=environment,
    )


@pytest.mark.robustness(
    "A7", "a framework starts torchrun by itself, and TTP_TORCHRUN=1 is set", "ttprun starts the workers"
)
@pytest.mark.integration
@pytest.mark.parametrize(("program", "value"), [("program", "1"), ("module", "True"), ("program", "0")])
def test_the_setting_chooses_the_launcher_of_the_workers(program: str, value: str, tmp_path: Path) -> None:
    completed = _run(tmp_path, program, value)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == f"['--iters', '8'] {'False 0' if value == '0' else 'True None'}\n"


@pytest.mark.integration
def test_an_invalid_value_is_one_line(tmp_path: Path) -> None:
    completed = _run(tmp_path, "program", "yes")
    assert completed.returncode == 1
    assert completed.stdout == ""
    assert completed.stderr == "torchrun: error: TTP_TORCHRUN is 'yes': it must be True, 1, False or 0\n"
