"""A fault in one of the framework's own saves harms neither that step nor the checkpoint before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptor.checkpoint import manifest
from adaptor.protocol import naming
from tests.faults import harness, outcome
from tests.faults.harness import DP2, TP2_DP1, Job
from tests.faults.scenario import BaselineOf, assert_last_words, goes_on


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        (1, "save"),
        (0, "save-write"),
        (1, "save-barrier"),
        (0, "save-barrier"),
        (0, "save-tracker"),
        (0, "save-named"),
    ],
)
def test_a_rank_is_killed_in_a_save(rank: int, phase: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    baseline = baseline_of(DP2)
    job = Job(
        tmp_path / "job",
        DP2,
        save=tmp_path / "save",
        save_interval=3,
        faults=[f"rank={rank},step=6,phase={phase},kind=sigkill"],
    )
    ended = harness.run(job)
    assert ended.code == 137
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
    outcome.assert_same_training(ended, baseline.records, steps=range(1, 7))
    if phase == "save-named":
        goes_on(job, baseline, 6)


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
    ended = harness.run(job)
    assert set(ended.codes) == {0}, ended.log[-3000:]
    assert "from step 3, 1 step lost" in ended.log
    outcome.assert_same_training(ended, baseline_of(TP2_DP1).records)
    for node, rank in enumerate(("mp_rank_00", "mp_rank_01")):
        folder = save / f"node{node}" / naming.final_name(harness.ITERATIONS)
        assert {path.parent.name for path in folder.rglob("*.pt")} == {rank}
        assert manifest.defects(folder) == []
