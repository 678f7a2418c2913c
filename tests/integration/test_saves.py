"""A fault in one of the framework's own saves harms neither that step nor the checkpoint before."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from adaptor.checkpoint import manifest, tracker
from adaptor.protocol import naming
from tests.faults import harness, outcome
from tests.faults.harness import DP2, TP2_DP1, Job, Layout, job_in
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf, assert_last_words
from tests.integration.test_formats import DIST as TORCH_DIST


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (1, "save"),
        (0, "save-write"),
        (0, "save-barrier"),
        (0, "save-tracker"),
        (0, "save-named"),
    ],
)
def test_a_rank_is_killed_in_a_save(rank: int, phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(DP2)
    job = job_in(tmp_path, DP2, save_interval=3, faults=[f"rank={rank},step=6,phase={phase},kind=sigkill"])
    result = harness.run(job, code=137)
    assert job.save is not None
    assert outcome.steps_in(job.save) == [3, 6]
    regular = job.save / "iter_0000003"
    assert manifest.defects(regular) == []
    files = manifest.read(regular).files
    # In save-write torch.save gets an open file, in which the fault strikes, and no name.
    if phase != "save-write":
        assert [file.path for file in files if file.xxh3_128 is None] == []
    assert {file.path for file in files} == {
        path.relative_to(regular).as_posix()
        for path in regular.rglob("*")
        if path.is_file() and path.name != naming.MANIFEST
    }
    assert_last_words(job.save, 6, baseline)
    outcome.assert_same_training(result, baseline.records, steps=range(1, 7))


@pytest.mark.parametrize(
    ("layout", "arguments", "phase", "error"),
    [
        (TP2_DP1, (), "save-write", "InjectedError"),
        (
            TORCH_DIST,
            ("--async-save", "--exit-interval", "8"),
            "save-background",
            "RuntimeError: results_queue",
        ),
    ],
    ids=["torch", "async-before-an-exit"],
)
def test_a_rank_cannot_write_its_part_of_a_save(
    layout: Layout,
    arguments: tuple[str, ...],
    phase: str,
    error: str,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    """Training goes on without the save of step 4. Where the save of the last step fails, that is a fault."""
    baseline = baseline_of(layout)
    job = job_in(
        tmp_path,
        layout,
        save_interval=4,
        restarts=1,
        arguments=arguments,
        faults=[f"rank=1,step={step},phase={phase},kind=exception" for step in (4, 8)],
    )
    result = harness.run(job, code=0)
    (failed,) = [line for line in result.said if f"step 4 could not be saved: rank 1: {error}" in line]
    assert failed.startswith("[ttp] step 4 ")
    assert f"training ends, and step 8 could not be saved: rank 1: {error}" in result.log
    assert "step 8 is saved, no finished step is lost" in result.log
    assert job.save is not None
    assert outcome.steps_in(job.save) == [8]
    folder = outcome.assert_saved(job.save, 8)
    unlike = differences(folder, baseline.checkpoints / folder.name)
    # The saved options are those of this job.
    assert [
        line for line in unlike if not re.search(r"args\./(async_save|exit_interval|ckpt_assume\w+): ", line)
    ] == []
    outcome.assert_same_training(result, baseline.records)


def test_nodes_with_disks_of_their_own_start_again_from_them(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Each has the files of its ranks, and a tracker."""
    save = tmp_path / "disks"
    job = Job(
        tmp_path / "job",
        TP2_DP1,
        save=save,
        load=save,
        own_disks=True,
        save_interval=3,
        restarts=1,
        faults=["rank=1,step=5,phase=forward,kind=sigkill"],
        nodes=2,
    )
    result = harness.run(job, code=0)
    assert "from step 3, 1 step lost" in result.log
    (line,) = [line for line in result.said if "the lease of node 0 is not there" in line]
    assert line.startswith(f"[ttp] node 1: --save is {save / 'node1'}, and ")
    assert "last words are written only where one node can write all of the model" in line
    outcome.assert_same_training(result, baseline_of(TP2_DP1).records)
    for node, rank in enumerate(("mp_rank_00", "mp_rank_01")):
        folder = save / f"node{node}" / naming.final_name(harness.ITERATIONS)
        assert {path.parent.name for path in folder.rglob("*.pt")} == {rank}
        assert manifest.defects(folder) == []


@pytest.mark.parametrize(
    ("phase", "cut", "step"),
    [("save-apart", False, 6), ("save-apart-named", False, 6), ("save-apart", True, 3)],
    ids=["before-the-name", "before-the-tracker", "and-the-power-is-cut"],
)
def test_a_job_is_lost_between_the_saves_of_two_disks(
    phase: str, cut: bool, step: int, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Node 0 has step 6 when rank 1 is killed. The next job goes on from one step on both disks."""
    baseline = baseline_of(TP2_DP1)
    save = tmp_path / "disks"
    lost = Job(
        tmp_path / "lost",
        TP2_DP1,
        save=save,
        load=save,
        own_disks=True,
        save_interval=3,
        faults=[f"rank=1,step=6,phase={phase},kind=sigkill"],
        nodes=2,
    )
    first = harness.run(lost)
    assert 0 not in first.codes, first.log[-3000:]
    roots = [save / "node0", save / "node1"]
    assert [tracker.tracked_step(root) for root in roots] == [6, 3]
    if cut:
        (written,) = roots[1].glob("iter_0000006_saving*/mp_rank_01/model_optim_rng.pt")
        os.truncate(written, 1000)
    resumed = harness.run(dataclasses.replace(lost, out=tmp_path / "resumed", faults=()), code=0)
    steps = range(step + 1, harness.ITERATIONS + 1)
    assert {line["iteration"] for lines in resumed.records.values() for line in lines} == set(steps)
    outcome.assert_same_training(resumed, baseline.records, steps=steps)
    damage_lines = [line for line in resumed.said if "step 6 is not whole on every node (node 1: " in line]
    if cut:
        (line,) = damage_lines
        assert line.endswith(
            "kept in aside_iter_0000006.1; the newest that is intact on every node is step 3"
        )
    else:
        assert damage_lines == []
    for root in roots:
        assert outcome.steps_in(root)[-1] == harness.ITERATIONS
        assert tracker.tracked_step(root) == harness.ITERATIONS


def test_the_first_save_of_two_disks_is_cut_short(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """All workers restart; node 1 has no tracker yet, and no --load names a checkpoint."""
    save = tmp_path / "disks"
    job = Job(
        tmp_path / "job",
        TP2_DP1,
        save=save,
        own_disks=True,
        save_interval=3,
        restarts=1,
        faults=["rank=1,step=3,phase=save-apart,kind=sigkill"],
        nodes=2,
    )
    result = harness.run(job, code=0)
    assert (
        "node 1: iter_0000003: the end of the job had cut its save short when all was written" in result.log
    )
    assert "from step 3" in result.log
    outcome.assert_same_training(result, baseline_of(TP2_DP1).records)


def test_two_nodes_start_again_before_anything_is_saved(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Another node might have a checkpoint on a disk of its own: all ranks look, and begin anew."""
    job = job_in(tmp_path, TP2_DP1, restarts=1, faults=["rank=1,step=2,phase=forward,kind=sigkill"], nodes=2)
    result = harness.run(job, code=0)
    baseline = baseline_of(TP2_DP1)
    outcome.assert_same_training(result, baseline.records)
    assert {line["iteration"] for lines in result.records.values() for line in lines} == set(
        range(1, harness.ITERATIONS + 1)
    )
