"""Spare nodes: a `ttprun` beyond --nnodes waits, and takes the place of a node that is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import first_place, harness, namespaces, outcome
from tests.faults.harness import DP2, job_in
from tests.faults.scenario import BaselineOf


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_a_spare_takes_the_place_of_a_lost_node(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Over a network, with three spares: the first is killed when it has the place, before its agent has
    connected; the second takes the place, and the third is released at the end.
    """
    with namespaces.two() as network:
        job = job_in(
            tmp_path,
            DP2,
            nodes=2,
            spares=3,
            killed_at_first_place=first_place.SPARE,
            network=network,
            restarts=2,
            environment={"TTP_TLS": "plain"},
            faults=["rank=1,step=6,phase=backward,kind=agent-sigkill"],
        )
        result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 0, 137, 137], result.log[-3000:]
    assert result.logs[0].count(" takes the place of node 1; ") == 2  # the first one is killed as it says so
    assert result.log.count("the job is over; this spare node was not needed") == 1
    assert "restart 2 of 2" in result.logs[0]
    outcome.assert_same_training(result, baseline_of(DP2).records)


def test_further_nodes_of_c10d_meet_the_others_in_a_restart(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """One further node for each lost node; the other continues to wait."""
    job = job_in(
        tmp_path,
        DP2,
        nodes=2,
        min_nodes=2,
        spares=2,
        restarts=2,
        options=("--ttp-online", "0"),
        faults=[
            "rank=1,step=4,phase=backward,kind=agent-sigkill",
            "rank=1,step=6,phase=backward,kind=agent-sigkill,restart=1",
        ],
    )
    result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 137, 137], result.log[-5000:]
    assert result.log.count("all workers of the job start again: this node meets the others") == 2
    assert "restart 2 of 2" in result.logs[0]
    outcome.assert_same_training(result, baseline_of(DP2).records)


def test_a_node_that_is_lost_between_two_starts_is_replaced_at_once(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """No controller exists at the kill, and the next controller has not met the node."""
    job = job_in(
        tmp_path,
        DP2,
        nodes=2,
        spares=1,
        dying_node=1,
        restarts=2,
        options=("--ttp-hang", "0"),
        faults=["rank=0,step=6,phase=backward,kind=sigkill"],
    )
    result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 137], result.log[-3000:]
    assert result.logs[0].count(" takes the place of node 1; ") == 1
    assert "restart 2 of 2" in result.logs[0]
    outcome.assert_same_training(result, baseline_of(DP2).records)


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_nodes_that_were_lost_come_back_as_spare_nodes(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Node 1 is lost, then node 0, then node 0 again: each comes back with its own command, and waits.

    Each place of node 0 is taken online, with its own rendezvous store, while node 1 has the controller. Then
    all ranks restart, with the controller on node 0.
    """
    back = "agent-sigkill-beside-a-node-that-is-back"
    with namespaces.two() as network:
        job = job_in(
            tmp_path,
            DP2,
            nodes=2,
            spares=1,
            returning_nodes=(1, 0),
            network=network,
            restarts=1,
            environment={"TTP_TLS": "plain"},
            options=("--ttp-online", "60"),
            faults=[
                "rank=1,step=2,phase=backward,kind=agent-sigkill",
                f"rank=0,step=4,phase=backward,kind={back}",
                f"rank=0,step=6,phase=backward,kind={back},restart=-1",
                "rank=0,step=8,phase=backward,kind=sigkill,restart=-1",
                "rank=1,step=8,phase=backward,kind=sigkill,restart=-1",
            ],
        )
        result = harness.run(job)
    assert result.codes == (137, 137, 0, 137, 0), result.log[-3000:]
    for node, step in ((1, 1), (0, 3), (0, 5)):
        place = f" has the place of node {node}, training goes on after step {step}, 0 steps lost, "
        assert result.logs[2].count(place) == 1, result.said
    assert "has taken node 1 for lost: this node waits as a spare node" in result.logs[3]
    assert ": this node waits there, as a spare node" in result.logs[4]
    assert "restart 1 of 1: from step " in result.logs[4]
    outcome.assert_same_training(result, baseline_of(DP2).records)


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_a_second_spare_comes_later_to_the_new_node_0(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Both spares have lost node 0, and their flags name its store; the second waits over the restart."""
    with namespaces.two() as network:
        job = job_in(
            tmp_path,
            DP2,
            nodes=2,
            spares=2,
            network=network,
            restarts=2,
            environment={"TTP_TLS": "plain"},
            faults=[
                "rank=0,step=3,phase=backward,kind=agent-sigkill",
                "rank=1,step=6,phase=backward,kind=agent-sigkill,restart=1",
            ],
        )
        result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 137, 137], result.log[-3000:]
    assert result.logs[1].count(" takes the place of node 1; ") == 2
    assert "restart 2 of 2: from step 5, 0 steps lost" in result.logs[1]
    outcome.assert_same_training(result, baseline_of(DP2).records)
