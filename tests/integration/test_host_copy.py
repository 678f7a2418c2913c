"""`TTP_HOST_COPY`: all holders of a shard are killed; the next start goes on from copies in host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.faults import harness, namespaces, outcome
from tests.faults.harness import (
    DP2,
    DP2_FP16,
    DP3,
    ITERATIONS,
    MOE_EP2_DP2,
    TP2_DP1,
    Ended,
    Job,
    Layout,
    job_in,
)
from tests.faults.library import train, undisturbed
from tests.faults.pickles import load
from tests.faults.same import differences
from tests.faults.scenario import Baseline, BaselineOf
from tests.integration.test_online import online

# No two ranks have the same experts, and no rank has a second copy of anything.
EXPERTS_ALONE = replace(MOE_EP2_DP2, replica="auto", instances=False)
IN_PARTS = replace(
    EXPERTS_ALONE, name="moe-dp2-ep2-dist", extra=(*EXPERTS_ALONE.extra, "--ckpt-format", "torch_dist")
)


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
    job = job_in(
        tmp_path,
        layout,
        save_interval=save_interval,
        options=["--ttp-host-copy", "2"],
        restarts=1,
        faults=faults,
    )
    baseline = baseline_of(layout)
    result = harness.run(job, code=0)
    assert f"[ttp] step 6 is written from the copies in host memory ({since})" in result.said
    assert job.save is not None
    folder = job.save / "iter_0000006"
    assert differences(folder, baseline.checkpoints / folder.name) == []
    outcome.assert_same_training(result, baseline.records)


def test_every_step_is_copied(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """With TTP_HOST_COPY=1 the death of a rank with its own experts costs no step that all ranks have
    finished. The checkpoint has files of the buddy and of the rank itself (torch_dist).
    """
    job = job_in(
        tmp_path,
        IN_PARTS,
        options=["--ttp-host-copy", "1"],
        restarts=1,
        faults=["rank=1,step=8,phase=update,kind=sigkill"],
    )
    baseline = baseline_of(IN_PARTS)
    result = harness.run(job, code=0)
    assert "[ttp] step 7 is written from the copies in host memory (nothing was saved)" in result.said
    assert job.save is not None
    folder = job.save / "iter_0000007"
    assert differences(folder, baseline.checkpoints / folder.name) == []
    outcome.assert_same_training(result, baseline.records)


@pytest.mark.parametrize("layout", [EXPERTS_ALONE, TP2_DP1], ids=lambda layout: layout.name)
def test_without_a_setting(layout: Layout, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """If a shard has only one holder, copies are made (TTP_HOST_COPY=auto), and a line reports the copies."""
    job = job_in(tmp_path, layout, restarts=1, faults=["rank=1,step=8,phase=update,kind=sigkill"])
    result = harness.run(job, code=0)
    (line,) = [line for line in result.said if "copies in host memory at least every 50 steps: " in line]
    assert line.endswith("not that of ttprun or of the node: there is no other node")
    assert "; exceptions; ranks that die cost up to 50 steps, from copies in host memory)" in result.log
    assert "copies in host memory, made at least every 50 steps, may have an earlier step" in result.log
    _assert_goes_on_from_copies(result, job, baseline_of(layout))


def test_experts_are_lost_with_their_node(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Without a setting; the loss of any of the two nodes costs some steps. The network is between them."""
    if not namespaces.permitted():
        pytest.skip("this user may make no network namespace")
    with namespaces.star(3) as network:
        job = job_in(
            tmp_path,
            EXPERTS_ALONE,
            nodes=2,
            spares=1,
            restarts=1,
            network=network,
            environment=Authority(tmp_path / "signer").settings(),
            faults=["rank=1,step=8,phase=backward,kind=agent-sigkill-behind-a-kept-copy"],
        )
        result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 137], result.log[-3000:]
    assert "; exceptions; ranks that die, or any 1 node, cost up to 50 steps, from copies in" in result.log
    _assert_goes_on_from_copies(result, job, baseline_of(EXPERTS_ALONE), places="local_rank")


def _assert_goes_on_from_copies(result: Ended, job: Job, baseline: Baseline, places: str = "") -> None:
    """Assert that the copied step is written as the framework saves it, except for `places`, and trained
    on.
    """
    (line,) = [line for line in result.said if "is written from the copies in host memory" in line]
    step = int(line.split()[2])
    assert 1 <= step <= 7
    assert job.save is not None
    folder = job.save / f"iter_{step:07d}"
    unequal = differences(folder, baseline.checkpoints / folder.name)
    assert [line for line in unequal if not places or places not in line] == []
    outcome.assert_same_training(result, baseline.records)


def test_no_restart_is_left(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Workers start once more, to write the copies; the job ends with the code of the fault."""
    job = job_in(
        tmp_path,
        TP2_DP1,
        options=["--ttp-host-copy", "2"],
        faults=["rank=1,step=8,phase=backward,kind=sigkill"],
    )
    result = harness.run(job, code=137)
    assert "[ttp] step 6 is written from the copies in host memory (nothing was saved)" in result.said
    assert "the state cannot be saved" in result.last_line
    assert result.last_line.endswith(
        f"; not started again: no restart is left; the newest checkpoint in {job.save} is step 6"
    )
    assert job.save is not None
    outcome.assert_saved(job.save, 6)
    assert differences(job.save / "iter_0000006", baseline_of(TP2_DP1).checkpoints / "iter_0000006") == []
    outcome.assert_same_training(result, baseline_of(TP2_DP1).records, steps=range(1, 8))


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_is_lost_with_the_only_holder_of_a_shard(
    node: int, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The agent of a node is killed with its copies; the other node has kept copies of them. With TLS."""
    job = job_in(
        tmp_path,
        TP2_DP1,
        nodes=2,
        spares=1,
        restarts=1,
        options=["--ttp-host-copy", "2"],
        environment=Authority(tmp_path / "signer").settings(),
        faults=[f"rank={node},step=8,phase=backward,kind=agent-sigkill-behind-a-kept-copy"],
    )
    baseline = baseline_of(TP2_DP1)
    result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 137], result.log[-3000:]
    (line,) = [line for line in result.said if "is written from the copies in host memory" in line]
    step = int(line.split()[2])
    assert step in (2, 4, 6)  # no copy is made while one is on its way to the next node
    assert job.save is not None
    folder = job.save / f"iter_{step:07d}"
    unequal = differences(folder, baseline.checkpoints / folder.name)
    assert unequal == [
        "mp_rank_01/model_optim_rng.pt/args./local_rank: 0 and 1"
    ]  # all were on one node there
    outcome.assert_same_training(result, baseline.records)


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_a_loop_of_ones_own_on_two_nodes(tmp_path: Path) -> None:
    """Two tensor-parallel ranks: only the dying rank holds its shard. The script finds a checkpoint of a
    copied step, with the script's counters of that step.
    """
    expected = undisturbed("--tensor", "2", layout=DP2, instances=1)
    save = tmp_path / "save"
    fault = "rank=1,step=8,phase=backward,kind=sigkill"
    with namespaces.two() as network:
        result = train(
            tmp_path / "job",
            *("--tensor", "2", "--save", str(save), "--loop", "run-steps"),
            layout=DP2,
            restarts=1,
            faults=[fault],
            options=("--ttp-host-copy", "2", "--ttp-online", "60"),
            network=network,
        )
    assert set(result.codes) == {0}, result.log[-3000:]
    (line,) = [line for line in result.said if "is written from the copies in host memory" in line]
    step = int(line.split()[2])
    # No copy is made while one is on its way to the next node, and these steps are shorter than that.
    assert step in (2, 4, 6)
    outcome.assert_saved(save, step)
    bodies = [load(path) for path in sorted(save.glob(f"iter_{step:07d}/*/model_optim_rng.pt"))]
    assert [body["counted"] for body in bodies] == [step, step]
    outcome.assert_same_training(result, expected)


def test_a_loop_of_ones_own_that_does_not_ask_for_them(tmp_path: Path) -> None:
    job = ("--tensor", "2", "--save", str(tmp_path / "save"), "--uncopied")
    result = train(tmp_path / "job", *job, layout=DP2, options=("--ttp-host-copy", "2"), code=2)
    assert result.last_line == (
        "ttprun: error: TTP_HOST_COPY is set: a loop of your own goes on from copies in host memory only"
        " where it calls adaptor.write_host_copies before it loads; do so, or leave it out"
    )


def test_a_rank_that_was_replaced_makes_copies_too(tmp_path: Path) -> None:
    """Rank 1 is replaced online; later both ranks with one of the shards die, the new process and another."""
    layout = ("--tensor", "2")
    expected = undisturbed(*layout)
    faults = [
        "rank=1,step=4,phase=backward,kind=sigkill",
        "rank=1,step=8,phase=backward,kind=sigkill,restart=-1,also=3",
    ]
    options = ("--ttp-host-copy", "2", "--ttp-online", "60", "--ttp-spares", "0")
    job = (*layout, "--save", str(tmp_path / "save"), "--loop", "run-steps")
    result = train(tmp_path / "job", *job, restarts=1, faults=faults, options=options, code=0)
    result.assert_says(" training goes on after step 3, 0 steps lost")
    since = "later than step 3, which was saved"
    assert f"[ttp] step 6 is written from the copies in host memory ({since})" in result.said
    outcome.assert_same_training(result, expected)


@pytest.mark.parametrize(
    ("layout", "fault"),
    [
        (TP2_DP1, "rank=1,step=8,phase=backward,kind=sigkill"),
        (EXPERTS_ALONE, "rank=0,step=8,phase=update,kind=sigkill"),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_online_all_go_back_to_their_copies(
    layout: Layout, fault: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Only the dead rank gets a new process; the others take step 6 and its data from their copies."""
    options = ("--ttp-spares", "0", "--ttp-host-copy", "2")
    job = online(tmp_path, layout, [fault], options=options, save_interval=4)
    baseline = baseline_of(layout)
    result = harness.run(job, code=0)
    (line,) = [line for line in result.said if " training goes on after step 6, " in line]
    assert "from copies in host memory; " in line
    assert "1 incident (1 without a restart), 0 steps lost" not in result.log
    assert {line["restart"] for lines in result.records.values() for line in lines} == {0}
    assert job.save is not None
    for step in (4, 8, ITERATIONS):
        assert differences(job.save / f"iter_{step:07d}", baseline.checkpoints / f"iter_{step:07d}") == []
    outcome.assert_same_training(result, baseline.records)
