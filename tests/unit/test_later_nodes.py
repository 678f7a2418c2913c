"""The moment at which waiting nodes are asked to join."""

from __future__ import annotations

from typing import cast

import pytest

from adaptor import output
from adaptor.launchers.rendezvous.rendezvous_handler import LaterNodes, Rendezvous

LAST_CALL_S = 30.0


class WaitingNodes:
    """Waiting nodes, a job of 2 nodes, and a clock."""

    last_call_s = LAST_CALL_S

    def __init__(self) -> None:
        self.nodes_that_wait = 0
        self.answer: bool | None = True
        self.now = 100.0
        self.asked: list[int] = []
        self.later = LaterNodes(cast("Rendezvous", self), self.fits, self.ask_for_nodes, lambda: self.now)

    def fits(self, nodes: int) -> bool | None:
        return self.answer

    def ask_for_nodes(self, count: int) -> None:
        self.asked.append(count)

    def after(self, seconds: float, waiting: int) -> list[int]:
        """Return the requested counts until `seconds` from now, with `waiting` nodes."""
        self.now += seconds
        self.nodes_that_wait = waiting
        self.later.look(2)
        return self.asked


def test_nodes_that_come_one_after_the_other_are_asked_for_once() -> None:
    around = WaitingNodes()
    assert around.after(500, 0) == []
    assert around.after(0, 1) == []
    assert around.after(LAST_CALL_S - 1, 2) == []
    assert around.after(LAST_CALL_S - 1, 2) == []
    assert around.after(1, 2) == [2]


def test_they_are_asked_for_again_when_an_incident_was_open() -> None:
    around = WaitingNodes()
    around.after(0, 1)
    assert around.after(LAST_CALL_S, 1) == [1]
    assert around.after(LAST_CALL_S - 1, 1) == [1]
    assert around.after(1, 1) == [1, 1]


def test_a_node_that_goes_away_is_not_asked_for() -> None:
    around = WaitingNodes()
    around.after(0, 1)
    around.after(LAST_CALL_S - 1, 0)
    assert around.after(LAST_CALL_S, 0) == []
    assert around.after(0, 1) == []


def test_a_job_that_has_not_begun_is_left_alone() -> None:
    around = WaitingNodes()
    around.answer = None
    around.after(0, 1)
    assert around.after(LAST_CALL_S, 1) == []
    around.answer = True
    assert around.after(0.1, 1) == [1]


def test_a_number_of_nodes_that_cannot_train_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    around = WaitingNodes()
    around.answer = False
    around.after(0, 1)
    for _ in range(3):
        assert around.after(LAST_CALL_S, 1) == []
    output.finish()
    stderr = capfd.readouterr().err
    assert stderr == (
        "[ttp] 1 more node waits: 3 nodes cannot train this job (parallel sizes, global batch, TTP_REPLICA);"
        " it goes on with 2\n"
    )
