"""Tests find what the adaptor has told, also where a script had begun a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import DP2, Ended, Job
from tests.unit.threads import LONG_S

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("begun", ["", "iteration 5", "datetime: 12:00:00 ", "ttprun: is fine. "])
@pytest.mark.parametrize("line", ["[ttp] protected from step 1", "ttprun: error: no such file"])
def test_a_line_that_comes_into_one_of_the_script(begun: str, line: str, tmp_path: Path) -> None:
    """`print` writes a text and the end of its line apart; here the adaptor's thread comes between."""
    program = (
        "import sys\n"
        "from adaptor import output\n"
        "sys.stdout.write(sys.argv[1])\n"
        "output.tell(sys.argv[2], to='stdout')\n"
        "output.drain(60.0)\n"
        "sys.stdout.write('\\n')\n"
    )
    log = subprocess.run(
        [sys.executable, "-u", "-c", program, begun, line],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=LONG_S,
        check=True,
    ).stdout
    assert log == f"{begun}{line}\n\n"
    ended = Ended(Job(tmp_path, DP2), (0,), (f"> before\n{log}",), {}, [], 0.0)
    assert ended.said == [line]
    assert ended.last_line == line


def test_what_the_adaptor_has_not_told() -> None:
    ended = Ended(Job(Path(), DP2), (1,), ("training ...\nttprun is gone\n",), {}, [], 0.0)
    assert ended.said == []
    assert ended.last_line == "ttprun is gone"
