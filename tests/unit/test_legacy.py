"""What those that stand by are told, and nobody else."""

from __future__ import annotations

from adaptor.control.legacy import Heirs
from adaptor.control.messages import AgentHello, AgentLost, Layout, Place, Share


def hello(node: int) -> AgentHello:
    return AgentHello(node, (node,), Place("10.0.0.1", 8000 + node) if 1 <= node <= 3 else None)


def layout(rank: int) -> Layout:
    return Layout(rank, (Share("g", rank, 6),), "/save", 0, "same")


def test_who_stands_by_knows_everyone_and_everyone_knows_who_stands_by() -> None:
    heirs = Heirs()
    assert heirs.hear(hello(0)) == []
    assert heirs.hear(layout(0)) == []
    assert heirs.hear(hello(5)) == []
    assert heirs.hear(hello(2)) == [
        (2, hello(0)),
        (2, hello(5)),
        (2, layout(0)),
        (5, hello(2)),
    ]
    assert heirs.hear(hello(4)) == [(4, hello(2)), (2, hello(4))]
    assert heirs.hear(layout(4)) == [(2, layout(4))]
    assert heirs.hear(hello(1)) == [
        *((1, hello(node)) for node in (0, 5, 2, 4)),
        *((1, layout(rank)) for rank in (0, 4)),
        *((node, hello(1)) for node in (5, 2, 4)),
    ]
    assert heirs.hear(AgentLost(2)) == []
    assert heirs.hear(layout(5)) == [(1, layout(5))]
