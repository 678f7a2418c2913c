"""The controller, by golden traces: tests/unit/controller_traces, in the language of `traces.py`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control import controller
from adaptor.control.controller import Controller
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    BoardRecord,
    Died,
    Dump,
    Freeze,
    Frozen,
    Hello,
    Layout,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    Share,
    Still,
    Written,
)
from tests.unit.traces import replay

TRACES = sorted((Path(__file__).parent / "controller_traces").glob("*.txt"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    expected = path.read_text()
    now = replay(expected)
    if os.environ.get("UPDATE_TRACES"):
        path.write_text(now)
    assert now == expected


def test_twenty_thousand_ranks() -> None:
    """One kill in a job of 2,500 nodes: the work grows with the ranks, not with their square."""
    ranks, each, shards = 20_000, 8, 50
    job = Controller(ranks, 120.0, ("store", 1))
    for node in range(ranks // each):
        job.handle(AgentHello(node, tuple(range(node * each, (node + 1) * each))), 0.0)
    for rank in range(ranks):  # two copies of each shard, half of the job apart
        share = Share(f"g{rank % (ranks // 2) // shards}", rank % shards, shards)
        job.handle(Hello(rank, 1), 0.0)
        job.handle(Layout(rank, (share,), "/save", 0, "same"), 0.0)
    orders = job.handle(Died(7, -9, 0.0, BoardRecord(7)), 1.0)
    told = [order.message for _, order in orders if isinstance(order, Addressed)]
    assert told == [Freeze(1)] * (ranks - 1)
    assert not any(gc.is_tracked(order) for _, order in orders), "walked through again and again while made"
    for rank in range(ranks):
        if rank != 7:
            orders = job.handle(Frozen(rank, 1, BoardRecord(rank, 1, Phase.RUNNING, 5, 5, 5)), 2.0)
    assert [type(order) for _, order in orders] == [Prepare]
    orders = job.handle(Prepared(1, "/save/tmp", ""), 3.0)
    dumps = {order.rank: order.message for _, order in orders if isinstance(order, Addressed)}
    assert len(dumps) == ranks // 2
    assert 7 not in dumps
    assert ranks // 2 + 7 in dumps
    for rank, dump in dumps.items():
        assert isinstance(dump, Dump)
        (group,) = dump.groups
        if group.writer == rank:
            orders = job.handle(Written(rank, 1, 1, group.group, (FileEntry(group.group, 1, None),)), 4.0)
    assert [type(order) for _, order in orders] == [Publish]
    job.handle(Published(1, 5, "/save"), 5.0)
    assert job.verdict is not None
    assert (job.verdict.outcome, job.verdict.step) == ("saved", 5)


def test_nodes_that_stand_still_for_long_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation thousands of nodes say so again and again; all are looked at when one changes."""
    looks: list[int] = []
    hang = controller.hang
    monkeypatch.setattr(controller, "hang", lambda nodes: looks.append(1) or hang(nodes))
    nodes = range(100)
    job = Controller(len(nodes), 120.0, ("store", 1))
    for node in nodes:
        job.handle(AgentHello(node, (node,)), 0.0)
        job.handle(Hello(node, 1), 0.0)
    for seconds in (120.0, 128.0, 136.0):
        for node in nodes:
            assert job.handle(Still(node, seconds, -1, 5), seconds) == []
    assert len(looks) == 1
    job.handle(Still(7, 144.0, 5, -1), 144.0)
    assert job.incident is not None
