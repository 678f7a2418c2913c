"""Online recovery of a job on two nodes: a rank of either node gets a new process, the other node goes on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.faults import namespaces, outcome
from tests.faults.harness import DP2, DP4, ITERATIONS
from tests.faults.library import train, undisturbed
from tests.faults.scenario import BaselineOf, ends
from tests.integration.test_online import online, trains_on


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_ranks_of_two_nodes_with_a_network_between_them(tmp_path: Path, baseline_of: BaselineOf) -> None:
    """Each node has a network namespace with a single link to the other node.

    A rank of node 1 is killed early in a step, its other rank late in a step, then a rank of node 0.
    """
    faults = [
        f"rank={rank},step={step},phase={phase},kind=sigkill"
        for rank, step, phase in ((3, 3, "backward"), (2, 5, "update"), (0, 7, "backward"))
    ]
    with namespaces.two() as network:
        job = online(tmp_path, DP4, faults, nodes=2, network=network, environment={"TTP_TLS": "plain"})
        trains_on(job, baseline_of(DP4), incidents=3)


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_a_loop_of_ones_own_with_its_stages_on_two_nodes(tmp_path: Path) -> None:
    """A rank of each node is killed; a stage is on one node, and stages meet over the network."""
    layout = ("--stages", "2")
    expected = undisturbed(*layout)
    faults = ["rank=3,step=4,phase=backward,kind=sigkill", "rank=0,step=6,phase=update,kind=sigkill"]
    job = (*layout, "--save", str(tmp_path / "save"), "--loop", "run-steps")
    options = ("--ttp-online", "60", "--ttp-spares", "0")
    with namespaces.two() as network:
        result = train(tmp_path / "job", *job, restarts=1, faults=faults, options=options, network=network)
    assert set(result.codes) == {0}, result.log[-5000:]
    assert "2 incidents (2 without a restart), 0 steps lost" in result.log
    assert [result.log.count(f"back behind step {step}\n") for step in (3, 6)] == [4, 4]
    outcome.assert_saved(tmp_path / "save", 6)
    # The line of a step that all had finished when the rank was killed may be written nowhere.
    outcome.assert_same_training(result, expected, {*range(1, ITERATIONS + 1)} - {6})


def test_with_tls_and_a_spare_on_each_node(tmp_path: Path, baseline_of: BaselineOf) -> None:
    job = online(
        tmp_path,
        DP2,
        ["rank=1,step=6,phase=backward,kind=sigkill-beside-a-spare"],
        nodes=2,
        options=("--ttp-spares", "1"),
        environment=Authority(tmp_path / "signer").settings(),
    )
    result = trains_on(job, baseline_of(DP2))
    assert f"replaced by pid {result.stamps[0]['spare']}, " in result.log


def test_without_a_spare_node_a_lost_node_is_not_recovered_online(
    tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """No spare node waits: the step is saved, and the line says why."""
    job = online(tmp_path, DP4, ["rank=3,step=6,phase=backward,kind=agent-sigkill"], nodes=2)
    result, _ = ends(job, baseline_of(DP4), code=137, saved={5})
    assert "not recovered online: node 1 is lost, and no spare node waits" in result.log


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        (
            ["rank=1,step=6,phase=backward,kind=sigkill", "rank=3,phase=exchange,kind=agent-sigkill"],
            r"step 5 is saved, .*; not recovered online: rank [23] has died, too; nobody else holds shard 1",
        ),
        (
            ["rank=3,step=6,phase=backward,kind=sigkill", "rank=0,phase=exchange,kind=agent-sigkill"],
            r"rank 3 was ended by SIGKILL, node 0 is lost; step 5 is saved, no finished step is lost",
        ),
    ],
    ids=["agent", "controller"],
)
def test_an_agent_is_lost_in_the_middle_of_a_recovery(
    faults: list[str], reason: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The step was saved before."""
    result, _ = ends(online(tmp_path, DP4, faults, nodes=2), baseline_of(DP4), code=137, saved={5})
    assert re.search(reason, result.log)
