"""Nodes whose work on the save folder makes no progress."""

from __future__ import annotations

from adaptor.controller.failures import Failures
from adaptor.controller.incident import Incident
from adaptor.controller.membership import Membership
from adaptor.controller.saving import IoStallDetector
from adaptor.protocol.messages import AgentHello, BoardRecord, Dump, Layout, Phase, Share, Written


def test_a_node_with_work_and_no_progress_is_overdue() -> None:
    io_stall_detector = IoStallDetector(10.0)
    io_stall_detector.expect([0, 2])
    assert io_stall_detector.overdue(100.0) == set()
    io_stall_detector.moved(1)  # no work is pending
    io_stall_detector.moved(2)
    assert io_stall_detector.overdue(105.0) == set()
    assert io_stall_detector.overdue(110.0) == {0}
    assert io_stall_detector.overdue(115.0) == {0, 2}


def test_new_work_restarts_the_timer() -> None:
    io_stall_detector = IoStallDetector(10.0)
    io_stall_detector.expect([0])
    assert io_stall_detector.overdue(0.0) == set()
    io_stall_detector.expect([1])
    assert io_stall_detector.overdue(9.0) == set()
    assert io_stall_detector.overdue(18.9) == set()
    assert io_stall_detector.overdue(19.0) == {1}


def test_a_node_that_has_written_its_part_is_not_overdue() -> None:
    """Otherwise a node with a working disk would be given up with the node whose disk hangs."""
    group = {0: "g0", 1: "g1", 2: "g0", 3: "g1"}
    membership = Membership(4)
    membership.agents = {0, 1}
    membership.enter(AgentHello(0, (0, 1)))
    membership.enter(AgentHello(1, (2, 3)))
    for rank, name in group.items():
        membership.connected.add(rank)
        membership.add(Layout(rank, (Share(name, 0, 1),), "/save", 0, "same"))
    membership.record_deaths({0: -9})
    incident = Incident(1, membership, Failures(), opened_at=0.0, timeout_s=120.0, store=("here", 1, b""))

    def all_answer() -> None:
        for rank in (1, 2, 3):
            incident.on_frozen(rank, BoardRecord(rank, 1, Phase.RUNNING, 5, 5, 5))

    incident.open(by_exception=False)
    all_answer()
    orders = incident.saving.on_prepared("/save/iter_0000005_tmp", "", 0)
    assert {order.rank for _, order in orders} == {1, 2}
    incident.on_tick(0.0)
    incident.saving.on_written(Written(2, 1, 1, "g0", ()), 0.0)
    incident.saving.on_progress(0, 0.0)
    repeated_orders = []
    for at in (1.0, 7.0, 20.0, 39.0, 40.0, 41.5, 42.0):
        repeated_orders += incident.on_tick(at)
        all_answer()
    dumps = [order.rank for _, order in repeated_orders if isinstance(order.message, Dump)]
    assert dumps == [3]
    assert incident.state.target.blocked == {0}
