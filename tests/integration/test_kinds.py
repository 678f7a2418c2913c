"""Any end of a process gives the job the process's exit code and costs no finished step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import cgroups
from tests.faults.harness import DP2, job_in
from tests.faults.scenario import BaselineOf, ends, survives


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("sys.exit,code=3", 3),
        ("os._exit,code=0", 1),
        ("sys.exit,code=0", 1),
        ("sigsegv", 139),
    ],
    ids=["sys.exit", "_exit-0", "sys.exit-0", "sigsegv"],
)
def test_the_end_of_a_process(kind: str, code: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = job_in(tmp_path, DP2, faults=[f"rank=1,step=6,phase=backward,kind={kind}"])
    survives(job, baseline_of(DP2), code=code, saved={5})


def test_a_process_that_gets_sigterm(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The process stays alive as a holder until its agent has decided."""
    job = job_in(tmp_path, DP2, faults=["rank=1,step=5,phase=backward,kind=sigterm"])
    result = survives(job, baseline_of(DP2), code=143, saved={4, 5})
    assert "rank 1 was told to end by SIGTERM" in result.last_line


def test_the_kernel_kills_a_process_for_want_of_memory(tmp_path: Path, baseline_of: BaselineOf) -> None:
    try:
        with cgroups.too_little_memory() as group:
            job = job_in(
                tmp_path,
                DP2,
                faults=["rank=1,step=6,phase=backward,kind=oom"],
                environment={cgroups.MEMORY: str(group)},
            )
            result, _ = ends(job, baseline_of(DP2), code=137, saved={5})
            assert cgroups.killed_in(group) == 1
    except OSError as error:
        pytest.skip(f"not on this machine, or not for this user: {error}")
    assert "rank 1 was ended by SIGKILL" in result.last_line
