"""Ranks whose patches differ are told apart, ranks whose patches agree are not."""

from __future__ import annotations

from pathlib import Path

from tests.patches.conftest import Run

SCRIPT = """
import units
from adaptor import patching
patching.arm("ttp", raises=False)
import fake.core, fake.extra
print(patching.fingerprint("ttp"))
"""


def test_the_same_in_two_processes_and_different_after_drift(folder: Path, cold_python: Run) -> None:
    with (folder / "fake/core.py").open("a") as core:
        core.write("\ndef h(x=object()): ...\n")  # its default is another address in each process
    with (folder / "units.py").open("a") as units:
        units.write("\n@unit.patch('fake.core:h', why='-', accepts='(x=)')\ndef nothing(w, i, a, k): ...\n")
    first, second = (cold_python("-c", SCRIPT, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2"))
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.strip()) == 16
    assert first.stdout == second.stdout
    (folder / "fake/extra.py").write_text("def g(b, a): ...\n")
    third = cold_python("-c", SCRIPT, code=0)
    assert third.stdout != first.stdout
