"""A node is lost and a spare node takes its place online: the other nodes keep their processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import namespaces
from tests.faults.harness import DP4
from tests.faults.scenario import BaselineOf
from tests.integration.test_online import online, trains_on


@pytest.mark.skipif(not namespaces.permitted(), reason="this user may make no network namespace")
def test_a_spare_node_takes_the_place_of_a_lost_one(tmp_path: Path, baseline_of: BaselineOf) -> None:
    with namespaces.two() as network:
        job = online(
            tmp_path,
            DP4,
            ["rank=3,step=6,phase=backward,kind=agent-sigkill"],
            nodes=2,
            spares=1,
            network=network,
            environment={"TTP_TLS": "plain"},
        )
        ended = trains_on(job, baseline_of(DP4), lost_nodes=1)
    assert ended.logs[0].count(" has the place of node 1, training goes on with step 6, 0 steps lost, ") == 1
