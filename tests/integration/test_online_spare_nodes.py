"""A node is lost and a spare node takes its place online: the other nodes keep their processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import first_place, harness, namespaces, outcome
from tests.faults.harness import DP2, DP2_MIRROR, DP4, TP2_DP2, Layout
from tests.faults.namespaces import Namespaces
from tests.faults.scenario import BaselineOf
from tests.integration.test_online import online, trains_on
from tests.integration.test_online_log import DP4_EVERY_3RD

PLAIN = {"TTP_TLS": "plain"}
COLD, WARM = ("--ttp-spares", "0"), ("--ttp-spares", "1")
COPIES = ("--ttp-host-copy", "2")


@pytest.fixture
def network() -> Iterator[Namespaces]:
    if not namespaces.permitted():
        pytest.skip("this user may make no network namespace")
    with namespaces.two() as network:
        yield network


@pytest.mark.parametrize(
    ("layout", "interval", "kind", "spares"),
    [
        (TP2_DP2, 1, "agent-sigkill", COLD),
        (DP4_EVERY_3RD, 3, "agent-sigkill-beside-a-spare-node", (*WARM, *COPIES)),
    ],
    ids=["cold", "warm"],
)
def test_a_spare_node_takes_the_place_of_a_lost_one(
    layout: Layout,
    interval: int,
    kind: str,
    spares: tuple[str, ...],
    network: Namespaces,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    """The spare node uses up no restart. Later a rank is replaced on the spare node."""
    job = online(
        tmp_path,
        layout,
        [f"rank=3,step=4,phase=backward,kind={kind}", "rank=2,step=7,phase=update,kind=sigkill,restart=-1"],
        nodes=2,
        spares=1,
        network=network,
        environment=PLAIN,
        options=spares,
        restarts=1,
    )
    # The rank that writes the log is on the lost node, in the middle of an interval.
    result = trains_on(job, baseline_of(layout), incidents=2, log_interval=interval, lost_nodes=1)
    assert (
        result.logs[0].count(" has the place of node 1, training goes on after step 3, 0 steps lost, ") == 1
    )


def test_a_further_node_of_c10d_takes_the_place_of_a_lost_one(
    network: Namespaces, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Without a flag: the job had all of its nodes. Later a rank on the further node is replaced."""
    job = online(
        tmp_path,
        DP4,
        [
            "rank=3,step=4,phase=backward,kind=agent-sigkill",
            "rank=2,step=7,phase=update,kind=sigkill,restart=-1",
        ],
        nodes=2,
        min_nodes=2,
        spares=1,
        network=network,
        environment=PLAIN,
        options=WARM,
        restarts=1,
    )
    result = trains_on(job, baseline_of(DP4), incidents=2, lost_nodes=1)
    place = " has the place of node 1, training goes on after step 3, 0 steps lost, "
    assert result.logs[0].count(place) == 1


def test_a_spare_node_is_lost_when_it_has_taken_the_place(
    network: Namespaces, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The next spare node takes the place, in the second attempt of the same recovery."""
    job = online(
        tmp_path,
        DP2,
        ["rank=1,step=4,phase=backward,kind=agent-sigkill"],
        nodes=2,
        spares=2,
        killed_at_first_place=first_place.SPARE,
        network=network,
        environment=PLAIN,
    )
    result = trains_on(job, baseline_of(DP2), lost_nodes=2)
    assert result.logs[0].count(" takes the place of node 1; ") == 2


@pytest.mark.parametrize(
    ("layout", "faults", "lost"),
    [
        (
            DP2_MIRROR,
            [
                "rank=1,step=4,phase=backward,kind=agent-sigkill",
                "rank=1,phase=get,kind=agent-sigkill,restart=-1",
            ],
            2,
        ),
        (DP4, ["rank=3,step=4,phase=backward,kind=sigkill", "rank=2,phase=regroup,kind=agent-sigkill"], 1),
    ],
    ids=["of-the-spare-node", "of-a-rank-that-is-replaced"],
)
def test_an_agent_is_lost_in_the_recovery(
    layout: Layout,
    faults: list[str],
    lost: int,
    network: Namespaces,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    """The next spare node comes in another attempt."""
    job = online(tmp_path, layout, faults, nodes=2, spares=lost, network=network, environment=PLAIN)
    result = trains_on(job, baseline_of(layout), lost_nodes=lost)
    assert result.logs[0].count(" takes the place of node 1; ") == lost


@pytest.mark.parametrize(
    ("node", "min_nodes"), [(0, 0), (1, 0), (1, 2)], ids=["node-0", "node-1", "node-1-of-c10d"]
)
def test_a_node_is_cut_off_and_lives_on(
    node: int, min_nodes: int, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The cut node has a whole copy and saves the copy, without harm to the nodes that continue with the
    spare node.

    Node 0 believes that its side continues, but the spare node does not answer on that side.
    """
    if not namespaces.permitted():
        pytest.skip("this user may make no network namespace")
    with namespaces.star(3, cut=node) as network:
        job = online(
            tmp_path,
            DP2,
            ["rank=0,step=4,phase=backward,kind=cut"],
            nodes=2,
            min_nodes=min_nodes,
            spares=1,
            network=network,
            environment=PLAIN,
        )
        result = harness.run(job)
    assert (result.codes[1 - node], result.codes[2]) == (0, 0), result.log[-5000:]
    assert result.codes[node] != 0, result.logs[node][-3000:]
    place = f" has the place of node {node}, training goes on after step 3, 0 steps lost, "
    assert result.logs[1 - node].count(place) == 1
    assert "1 incident (1 without a restart), 0 steps lost" in result.logs[1 - node]
    outcome.assert_same_training(result, baseline_of(DP2).records)
