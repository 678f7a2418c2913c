"""What a job has left: checkpoints and records."""

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
    """The steps of the checkpoints below `root`."""
    steps = (naming.step_of(path.name) for path in root.iterdir())
    return sorted(step for step in steps if step is not None)


def spent(logs: Path) -> dict[str, float]:
    """How the job with this log folder has spent its time, as `ttp goodput` says it, in seconds."""
    return JobReader(job_reader.find(logs)).spent().seconds


def tracked(root: Path) -> str:
    """What the tracker says."""
    return (root / naming.TRACKER).read_text().strip()


def assert_tidy(root: Path) -> None:
    """Complete checkpoints and a tracker, nothing else, but the lease of a ttprun that was killed."""
    known = (naming.TRACKER, naming.LEASE)
    strange = [p.name for p in root.iterdir() if naming.step_of(p.name) is None and p.name not in known]
    assert not strange, f"{root} has {strange}"


def assert_saved(root: Path, step: int) -> Path:
    """The newest checkpoint is that of `step`, complete by its manifest, and the tracker names it."""
    assert_tidy(root)
    assert steps_in(root)[-1] == step
    assert tracked(root) == str(step)
    folder = root / naming.final_name(step)
    assert manifest.defects(folder) == []
    return folder


def assert_same_training(
    ended: Ended, baseline: dict[int, list[dict[str, Any]]], steps: Iterable[int] | None = None
) -> None:
    """Whatever was recorded is, bit for bit, what the run that never failed recorded.

    Args:
        steps: those that every rank must have recorded, all of them if None.
    """
    wanted = set(range(1, ITERATIONS + 1) if steps is None else steps)
    expected = {
        (rank, line["iteration"]): _figures(line) for rank, lines in baseline.items() for line in lines
    }
    assert ended.records.keys() == baseline.keys()
    for rank, lines in ended.records.items():
        assert wanted <= {line["iteration"] for line in lines}, f"rank {rank} has not recorded every step"
        for line in lines:
            assert _figures(line) == expected[rank, line["iteration"]], f"rank {rank}: {line}"


def _figures(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("losses", "grad_norm", "skipped")}
