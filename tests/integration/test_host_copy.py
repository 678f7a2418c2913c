"""`TTP_HOST_COPY`: all holders of a shard are killed; the next start goes on from copies in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.faults import harness, outcome
from tests.faults.harness import DP2_FP16, DP3, TP2_DP1, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf


@pytest.mark.parametrize(
    ("layout", "faults", "save_interval", "since"),
    [
        (DP3, ["rank=1,step=8,phase=backward,kind=sigkill,also=2"], 1000, "nothing was saved"),
        (TP2_DP1, ["rank=1,step=8,phase=norm,kind=sigkill"], 4, "later than step 4, which was saved"),
        (DP2_FP16, ["rank=1,step=7,phase=update,kind=sigkill,also=0"], 1000, "nothing was saved"),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_no_holder_of_a_shard_is_left(
    layout: Layout,
    faults: list[str],
    save_interval: int,
    since: str,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    job = Job(
        tmp_path / "job",
        layout,
        save=tmp_path / "save",
        save_interval=save_interval,
        options=["--ttp-host-copy", "2"],
        restarts=1,
        faults=faults,
    )
    baseline = baseline_of(layout)
    ended = harness.run(job)
    assert ended.code == 0, ended.log[-3000:]
    assert f"[ttp] step 6 is written from the copies in host memory ({since})" in ended.said
    assert job.save is not None
    folder = job.save / "iter_0000006"
    assert differences(folder, baseline.checkpoints / folder.name) == []
    outcome.assert_same_training(ended, baseline.records)


def test_no_restart_is_left(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Workers start once more, to write the copies; the job ends with the code of the fault."""
    job = Job(
        tmp_path / "job",
        TP2_DP1,
        save=tmp_path / "save",
        options=["--ttp-host-copy", "2"],
        faults=["rank=1,step=8,phase=backward,kind=sigkill"],
    )
    ended = harness.run(job)
    assert ended.code == 137, ended.log[-3000:]
    assert "[ttp] step 6 is written from the copies in host memory (nothing was saved)" in ended.said
    assert "the state cannot be saved" in ended.last_line
    assert ended.last_line.endswith(
        f"; not started again: no restart is left; the newest checkpoint in {job.save} is step 6"
    )
    assert job.save is not None
    outcome.assert_saved(job.save, 6)
    assert differences(job.save / "iter_0000006", baseline_of(TP2_DP1).checkpoints / "iter_0000006") == []
    outcome.assert_same_training(ended, baseline_of(TP2_DP1).records, steps=range(1, 8))


def test_a_node_is_lost_with_the_only_holder_of_a_shard(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The agent of node 1 is killed, and its copies go along; node 0 has kept them, too. With TLS."""
    job = Job(
        tmp_path / "job",
        TP2_DP1,
        save=tmp_path / "save",
        nodes=2,
        spares=1,
        restarts=1,
        options=["--ttp-host-copy", "2"],
        environment=Authority(tmp_path / "signer").settings(),
        faults=["rank=1,step=8,phase=backward,kind=agent-sigkill"],
    )
    baseline = baseline_of(TP2_DP1)
    ended = harness.run(job)
    assert sorted(ended.codes) == [0, 0, 137], ended.log[-3000:]
    (line,) = [line for line in ended.said if "is written from the copies in host memory" in line]
    step = int(line.split()[2])
    assert step in (4, 6)  # the newest may have been on its way
    assert job.save is not None
    folder = job.save / f"iter_{step:07d}"
    found = differences(folder, baseline.checkpoints / folder.name)
    assert found == ["mp_rank_01/model_optim_rng.pt/args./local_rank: 0 and 1"]  # all were on one node there
    outcome.assert_same_training(ended, baseline.records)
