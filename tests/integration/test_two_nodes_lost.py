"""Node 0 is lost, and in the same recovery a second node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import first_place, harness, namespaces, outcome
from tests.faults.harness import DP2_MIRROR, Job, Layout
from tests.faults.namespaces import Namespaces
from tests.faults.scenario import BaselineOf
from tests.integration.test_online import online, trains_on

DP3_MIRROR = Layout("dp3-mirror", 3, replica="mirror", extra=("--global-batch-size", "9"))
DP4_MIRROR = Layout("dp4-mirror", 4, replica="mirror")
LOST = "rank=0,step=4,phase=backward,kind=agent-sigkill"


@pytest.fixture
def network() -> Iterator[Namespaces]:
    if not namespaces.permitted():
        pytest.skip("this user may make no network namespace")
    with namespaces.star(6) as network:
        yield network


@pytest.mark.parametrize(
    ("layout", "spares", "second", "min_nodes"),
    [
        (DP3_MIRROR, 2, "rank=1,phase=regroup,kind=agent-sigkill", 0),
        (DP3_MIRROR, 2, "rank=1,phase=regroup,kind=agent-sigkill", 3),
        (DP2_MIRROR, 2, "rank=1,phase=regroup,kind=agent-sigkill", 0),
    ],
    ids=["of-3", "of-3-c10d", "of-2"],
)
def test_the_node_that_has_taken_over_is_lost_when_a_spare_has_the_place_of_node_0(
    layout: Layout,
    spares: int,
    second: str,
    min_nodes: int,
    network: Namespaces,
    tmp_path: Path,
    baseline_of: BaselineOf,
) -> None:
    """All start again from the published step, at the store of that spare node."""
    job = online(
        tmp_path,
        layout,
        [LOST, second],
        nodes=layout.processes,
        min_nodes=min_nodes,
        spares=spares,
        network=network,
        environment={"TTP_TLS": "plain"},
    )
    result = harness.run(job)
    assert sorted(result.codes)[-2:] == [137, 137], result.log[-5000:]
    assert sorted(result.codes)[:-2] == [0] * (layout.processes + spares - 2), result.log[-5000:]
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    outcome.assert_same_training(result, baseline_of(layout).records)


@pytest.mark.parametrize("min_nodes", [0, 2], ids=["static", "c10d"])
def test_the_recovery_fails_when_a_spare_node_has_the_place_of_node_0(
    min_nodes: int, network: Namespaces, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Two new processes of a rank end: all start again at the store of that spare node."""
    newcomer_faults = [f"rank=0,phase={phase},kind=sigkill,restart=-1" for phase in ("get", "exchange")]
    job = online(
        tmp_path,
        DP2_MIRROR,
        [LOST, *newcomer_faults],
        nodes=2,
        min_nodes=min_nodes,
        spares=1,
        network=network,
        environment={"TTP_TLS": "plain"},
    )
    result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 137], result.log[-5000:]
    assert "not recovered online: the new process of rank 0 " in result.log
    assert "restart 1 of 1: from step 3, 0 steps lost" in result.log
    outcome.assert_same_training(result, baseline_of(DP2_MIRROR).records)


def _four_nodes_and_two_spares(
    tmp_path: Path, network: Namespaces, min_nodes: int, faults: list[str], **options: Any
) -> Job:
    return online(
        tmp_path,
        DP4_MIRROR,
        faults,
        nodes=4,
        min_nodes=min_nodes,
        spares=2,
        network=network,
        environment={"TTP_TLS": "plain"},
        **options,
    )


@pytest.mark.parametrize("min_nodes", [0, 4], ids=["static", "c10d"])
def test_node_0_and_another_node_are_lost_at_once(
    min_nodes: int, network: Namespaces, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """A spare node takes the place of node 0, and another spare comes to the store of the first spare."""
    faults = [LOST, "rank=2,step=4,phase=backward,kind=agent-sigkill-behind-another-fault"]
    job = _four_nodes_and_two_spares(tmp_path, network, min_nodes, faults)
    result = trains_on(job, baseline_of(DP4_MIRROR), lost_nodes=2)
    assert result.logs[1].count(" has the place of node 0, ") == 1
    assert result.logs[1].count(" has the place of node 2, ") == 1


@pytest.mark.parametrize("min_nodes", [0, 4], ids=["static", "c10d"])
def test_node_0_is_lost_when_it_has_given_the_place_of_another_lost_node(
    min_nodes: int, network: Namespaces, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The spare node with the place is a spare again, at the node that takes over."""
    faults = ["rank=2,step=4,phase=backward,kind=agent-sigkill"]
    job = _four_nodes_and_two_spares(
        tmp_path, network, min_nodes, faults, killed_at_first_place=first_place.NODE_0
    )
    result = harness.run(job)
    assert sorted(result.codes) == [0, 0, 0, 0, 137, 137], result.log[-5000:]
    assert result.log.count(": this node waits as a spare node again") == 1
    assert "0 steps lost" in result.logs[1]
    outcome.assert_same_training(result, baseline_of(DP4_MIRROR).records)
