"""However a process ends, its exit code is that of the job, and no finished step is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness import DP4, Job
from tests.faults.scenario import BaselineOf, survives


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("os._exit,code=7", 7),
        ("sys.exit,code=3", 3),
        ("sigsegv", 139),
        ("sigterm", 143),
    ],
    ids=["_exit", "sys.exit", "sigsegv", "sigterm"],
)
def test_the_end_of_a_process(kind: str, code: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        faults=[f"rank=2,step=6,phase=backward,kind={kind}"],
    )
    survives(job, baseline_of(DP4), code=code, saved={5})
