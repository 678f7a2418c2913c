"""The disk refuses the last words: the job says so, and what was saved before stays as it is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults import harness, outcome
from tests.faults.harness import DP2, Job
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf


@contextmanager
def _disk(place: Path, size: int) -> Iterator[None]:
    """A disk of `size` bytes at `place`, for as long as it is needed."""
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        subprocess.run(mounting, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_the_disk_is_full(tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(DP2)
    one = sum(path.stat().st_size for path in (baseline.checkpoints / "iter_0000004").rglob("*.*"))
    save = tmp_path / "disk"
    with _disk(save, one * 3 // 2):
        job = Job(
            tmp_path / "job",
            DP2,
            save=save,
            save_interval=4,
            faults=["rank=1,step=7,phase=backward,kind=sigkill"],
        )
        ended = harness.run(job)
        folder = outcome.assert_saved(save, 4)
        assert outcome.steps_in(save) == [4]
        assert differences(folder, baseline.checkpoints / folder.name) == []
    assert ended.code == 137
    assert "the state cannot be saved: " in ended.last_line
    assert "No space left on device" in ended.last_line
    assert ended.last_line.endswith(f"the newest checkpoint in {save} is step 4")
