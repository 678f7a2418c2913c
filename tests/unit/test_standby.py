"""Messages for standby nodes, and for nobody else."""

from __future__ import annotations

import msgspec

from adaptor.controller.failover import StandbyReplicator
from adaptor.protocol.messages import AgentHello, AgentLost, Endpoint, Layout, Share


def hello(node: int) -> AgentHello:
    return AgentHello(node, (node,), Endpoint("10.0.0.1", 8000 + node) if 1 <= node <= 3 else None)


def layout(rank: int) -> Layout:
    return Layout(rank, (Share("g", rank, 6),), "/save", 0, "same")


def test_standby_nodes_know_all_nodes_and_are_known_to_all() -> None:
    replicator = StandbyReplicator()
    assert replicator.replicate(hello(0)) == []
    assert replicator.replicate(layout(0)) == []
    assert replicator.replicate(hello(5)) == []
    assert replicator.replicate(hello(2)) == [(2, hello(0)), (2, hello(5)), (2, layout(0)), (5, hello(2))]
    assert replicator.replicate(hello(4)) == [(4, hello(2)), (2, hello(4))]
    assert replicator.replicate(layout(4)) == [(2, layout(4))]
    assert replicator.replicate(hello(1)) == [
        *((1, hello(node)) for node in (0, 5, 2, 4)),
        *((1, layout(rank)) for rank in (0, 4)),
        *((node, hello(1)) for node in (5, 2, 4)),
    ]
    assert replicator.replicate(AgentLost(2)) == []
    assert replicator.replicate(layout(5)) == [(1, layout(5))]


def test_a_spare_node_does_not_get_the_hello_of_its_predecessor() -> None:
    """Otherwise the spare would not recognise its own node as a later controller."""
    replicator = StandbyReplicator()
    replicator.replicate(hello(0))
    replicator.replicate(hello(2))
    replicator.replicate(hello(1))
    replicator.replicate(AgentLost(1))
    spare = msgspec.structs.replace(hello(1), owner="a")
    assert replicator.replicate(spare) == [(1, hello(0)), (1, hello(2)), (2, spare)]


def test_layouts_relayed_by_a_lost_controller_are_relayed_again() -> None:
    """No agent repeats the layouts of lost ranks: a spare in node 0's place would not know them."""
    replicator = StandbyReplicator(1)
    replicator.succeed([hello(0), layout(0)])
    replicator.replicate(hello(2))
    replicator.replicate(layout(2))
    spare = msgspec.structs.replace(hello(0), owner="a")
    assert replicator.replicate(spare) == [(0, hello(2)), *((0, layout(rank)) for rank in (0, 2)), (2, spare)]
