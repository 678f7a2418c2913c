"""Assertions about checkpoints and records that a job has written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from adaptor.checkpoint import manifest
from adaptor.operations import job_reader
from adaptor.operations.job_reader import JobReader
from adaptor.protocol import naming
from tests.faults.harness import ITERATIONS, Ended


def steps_in(root: Path) -> list[int]:
    """Return the sorted steps of the checkpoints in `root`."""
    steps = (naming.step_of(path.name) for path in root.iterdir())
    return sorted(step for step in steps if step is not None)


def spent(logs: Path) -> dict[str, float]:
    """Return the time of a job by use, as `ttp goodput` reports it.

    Args:
        logs: the job's log folder.

    Returns:
        Seconds by use.
    """
    return JobReader(job_reader.find(logs)).spent().seconds


def tracked(root: Path) -> str:
    """Return the content of the tracker."""
    return (root / naming.TRACKER).read_text().strip()


def assert_tidy(root: Path) -> None:
    """Assert that `root` has only complete checkpoints and a tracker, and perhaps the lease of a killed
    ttprun.
    """
    expected = (naming.TRACKER, naming.LEASE)
    unexpected = [
        path.name
        for path in root.iterdir()
        if naming.step_of(path.name) is None and path.name not in expected
    ]
    assert not unexpected, f"{root} has {unexpected}"


def assert_saved(root: Path, step: int) -> Path:
    """Assert that the newest checkpoint is of `step`, complete by its manifest, and named by the tracker."""
    assert_tidy(root)
    assert steps_in(root)[-1] == step
    assert tracked(root) == str(step)
    folder = root / naming.final_name(step)
    assert manifest.defects(folder) == []
    return folder


def assert_same_training(
    result: Ended, baseline: dict[int, list[dict[str, Any]]], steps: Iterable[int] | None = None
) -> None:
    """Assert that every record equals, bit for bit, the record of the undisturbed run.

    Args:
        result: the job.
        baseline: the records of the undisturbed run.
        steps: the steps that every rank must have recorded; None: all of them.
    """
    required = set(range(1, ITERATIONS + 1) if steps is None else steps)
    expected = {
        (rank, line["iteration"]): _figures(line) for rank, lines in baseline.items() for line in lines
    }
    assert result.records.keys() == baseline.keys()
    for rank, lines in result.records.items():
        assert required <= {line["iteration"] for line in lines}, f"rank {rank} has not recorded every step"
        for line in lines:
            assert _figures(line) == expected[rank, line["iteration"]], f"rank {rank}: {line}"


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("losses", "grad_norm", "skipped")}
