"""Whose work on the save folder stands still."""

from __future__ import annotations

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
