"""Whom an agent obeys, and where it goes when that one is lost."""

from __future__ import annotations

from adaptor.control.messages import (
    AgentHello,
    Beat,
    Dismissed,
    Hello,
    Layout,
    Place,
    Progress,
    Recalled,
    Verdict,
)
from adaptor.control.succession import Succession

HELLO = AgentHello(2, (4, 5))
FIRST = AgentHello(0, (0, 1))
GATE = Place("10.0.0.2", 8000)
VERDICT = Verdict(1, "saved", 5, "as it was", 0, 3, "/save")


def _terms(known: Succession) -> list[int]:
    found = []
    while known.go_on():
        found.append(known.term)
        if known.is_mine:
            break
    return found


def test_the_nodes_that_stand_by_are_gone_through_in_their_order() -> None:
    known = Succession(2, 4)
    for order in (FIRST, AgentHello(1, (2, 3), GATE), AgentHello(3, (6, 7), GATE)):
        assert not known.hear(order)
    assert _terms(known) == [1, 2]
    assert known.is_mine


def test_who_does_not_know_all_of_them_goes_nowhere() -> None:
    """They would go to another controller than those that do."""
    known = Succession(2, 9)
    for order in (FIRST, AgentHello(3, (6, 7), GATE), AgentHello(1, (2, 3), GATE)):
        assert not known.knows_the_way
        assert not known.go_on()
        known.hear(order)
    assert known.knows_the_way
    assert _terms(known) == [1, 2]


def test_who_may_have_the_controller_must_know_of_node_0() -> None:
    known = Succession(1, 2)
    assert not known.knows_the_way
    known.hear(FIRST)
    assert known.knows_the_way


def test_a_node_that_does_not_stand_by_finds_the_others() -> None:
    known = Succession(7, 8)
    for node in (1, 2, 3):
        known.hear(AgentHello(node, (node,), GATE))
    assert _terms(known) == [1, 2, 3]
    assert known.gate == GATE


def test_a_job_of_one_node_has_no_other_controller() -> None:
    known = Succession(0, 1)
    assert known.knows_the_way
    assert not known.go_on()


def test_what_a_new_controller_is_told() -> None:
    known = Succession(2, 3)
    for message in (HELLO, Hello(4, 1000), Progress(2, 7), Beat()):
        known.keep(message)
    assert known.all_again == [HELLO, Hello(4, 1000), Recalled(2)]
    assert known.hear(VERDICT)
    assert known.all_again[-1] == Recalled(2, VERDICT)


def test_what_is_obeyed() -> None:
    known = Succession(2, 3)
    layout = Layout(0, (), "/save", 0, "same")
    assert [known.hear(order) for order in (FIRST, layout, Beat())] == [False] * 3
    assert known.legacy == [FIRST, layout]
    assert known.hear(Dismissed())
    assert [known.hear(VERDICT), known.hear(VERDICT)] == [True, False]
