"""Whose work on the save folder stands still."""

from __future__ import annotations

from adaptor.control.incident import Incident
from adaptor.control.messages import BoardRecord, Dump, Layout, Phase, Share, Written
from adaptor.control.standstill import Standstill


def test_who_has_work_and_does_not_move_is_overdue() -> None:
    still = Standstill(10.0)
    still.expect([0, 2])
    assert still.overdue(100.0) == set()
    still.moved(1)  # it has no work
    still.moved(2)
    assert still.overdue(105.0) == set()
    assert still.overdue(110.0) == {0}
    assert still.overdue(115.0) == {0, 2}


def test_new_work_begins_anew() -> None:
    still = Standstill(10.0)
    still.expect([0])
    assert still.overdue(0.0) == set()
    still.expect([1])
    assert still.overdue(9.0) == set()
    assert still.overdue(18.9) == set()
    assert still.overdue(19.0) == {1}


def test_who_has_written_all_of_its_part_is_not_overdue() -> None:
    """Else the node on whose disk nothing hangs would be given up with the one where it does."""
    group = {0: "g0", 1: "g1", 2: "g0", 3: "g1"}
    layouts = {rank: Layout(rank, (Share(name, 0, 1),), "/save", 0, "same") for rank, name in group.items()}
    incident = Incident(
        *(1, {1: 0, 2: 1, 3: 1}, {0, 1}, layouts, 4),  # rank 0 is dead; 1 is on node 0, 2 and 3 on node 1
        opened_at=0.0,
        timeout_s=120.0,
        store=("here", 1),
    )

    def all_answer() -> None:
        for rank in (1, 2, 3):
            incident.on_frozen(rank, BoardRecord(rank, 1, Phase.RUNNING, 5, 5, 5))

    incident.open(by_death=True)
    all_answer()
    orders = incident.on_prepared("/save/iter_0000005_tmp", "", 0)
    assert {order.rank for order in orders} == {1, 2}
    incident.on_tick(0.0)
    incident.on_written(Written(2, 1, 1, "g0", ()), 0.0)
    incident.on_progress(0, 0.0)
    again = []
    for at in (1.0, 7.0, 20.0, 39.0, 40.0, 41.5, 42.0):
        again += incident.on_tick(at)
        all_answer()
    dumps = [order for order in again if isinstance(order.message, Dump)]
    assert [order.rank for order in dumps] == [3]
    assert incident.place.blocked == {0}
