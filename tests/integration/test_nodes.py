"""Two agents, on one machine, each with two of the four workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.faults import harness, namespaces, outcome
from tests.faults.harness import DP4, Job
from tests.faults.scenario import BaselineOf, assert_last_words, ends, restarts

RANKS = pytest.mark.parametrize("rank", [1, 2], ids=["node0", "node1"])


@RANKS
def test_both_agents_end_with_the_code_of_the_failed_worker(
    rank: int, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        nodes=2,
        faults=[f"rank={rank},step=6,phase=update,kind=sigkill"],
    )
    ends(job, baseline_of(DP4), code=137, saved={6})


@RANKS
def test_both_agents_restart_together(rank: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Where the other node's worker dies, with TLS between the two."""
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        nodes=2,
        restarts=1,
        faults=[f"rank={rank},step=6,phase=backward,kind=sigkill"],
        environment=Authority(tmp_path / "signer").settings() if rank == 2 else {},
    )
    restarts(job, baseline_of(DP4), saved={5})


@pytest.mark.parametrize("rank", [0, 3], ids=["node0", "node1"])
def test_one_node_is_told_to_end(rank: int, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The job cannot go on without it, so all of it ends, saved, whatever restarts are left."""
    job = Job(
        tmp_path / "job",
        DP4,
        save=tmp_path / "save",
        nodes=2,
        restarts=1,
        faults=[f"rank={rank},step=5,phase=forward,kind=agent-sigterm"],
    )
    ended, _ = ends(job, baseline_of(DP4), code=143, saved={4, 5, 6, 7})
    for log in ended.logs:
        assert f"ttprun on node {rank // 2} was told to end by SIGTERM; step " in log
    assert all(line["restart"] == 0 for lines in ended.records.values() for line in lines)


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may not make network namespaces")
def test_a_network_that_falls_silent(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """No connection is closed, no packet arrives. The side with the controller saves, the other one ends."""
    save = tmp_path / "save"
    with namespaces.two() as network:
        job = Job(
            tmp_path / "job",
            DP4,
            save=save,
            nodes=2,
            network=network,
            environment={"TTP_TLS": "plain"},
            faults=["rank=3,step=6,phase=forward,kind=cut"],
        )
        ended = harness.run(job)
    assert ended.codes == (137, 1), ended.log[-3000:]
    assert "node 1 is lost; step 5 is saved, no finished step is lost" in ended.logs[0]
    assert "the controller's node is lost; nothing more can be saved from node 1" in ended.logs[1]
    assert outcome.steps_in(save) == [5]
    assert_last_words(save, 5, baseline_of(DP4))


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may not make network namespaces")
def test_what_is_slow_is_not_lost(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """A cut that is mended, links that are slow from then on, an agent that stands still for a while."""
    with namespaces.two() as network:
        job = Job(
            tmp_path / "job",
            DP4,
            save=tmp_path / "save",
            nodes=2,
            network=network,
            environment={"TTP_TLS": "plain"},
            faults=[
                "rank=3,step=3,phase=forward,kind=short-cut",
                "rank=2,step=5,phase=forward,kind=agent-pause",
            ],
        )
        ended = harness.run(job)
    assert ended.codes == (0, 0), ended.log[-3000:]
    assert not list((job.out / "logs").glob("incident-*"))
    outcome.assert_same_training(ended, baseline_of(DP4).records)
