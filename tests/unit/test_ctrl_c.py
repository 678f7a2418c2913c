"""Ctrl-C to commands of `ttp` that go on until it comes; `ttp serve` is in `test_serve.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.launching import DROPPED, HEARS_CTRL_C
from tests.unit.test_serve import job  # noqa: F401

# Ctrl-C comes at the first look at the files of the job, and is lost; a second look is one too many.
LOOKED_AT_ONCE = """
import os
from adaptor.operations import job_folder
LOOK = job_folder.{look}
looks = 0
def looked(*arguments):
    global looks
    looks += 1
    if looks > 1:
        os._exit(3)
    interrupt()
    return LOOK(*arguments)
job_folder.{look} = looked
"""


@pytest.mark.parametrize(
    ("command", "look"),
    [(("status", "--watch"), "status"), (("otel", "--follow"), "goes_on")],
    ids=["status", "otel"],
)
def test_ctrl_c_that_python_has_dropped(command: tuple[str, str], look: str, job: Path) -> None:  # noqa: F811
    program = (
        f"{HEARS_CTRL_C}\n{DROPPED}\n{LOOKED_AT_ONCE.format(look=look)}\n"
        "from adaptor.launchers import ttp; raise SystemExit(ttp.main())"
    )
    line = [sys.executable, "-c", program, *command, str(job)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 130, done.stderr
