"""The controller by golden traces: tests/unit/controller_traces, in the language of `traces.py`."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from adaptor.controller import hang_detector
from adaptor.controller.controller import Controller, Orders
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentTerminationRequested,
    BoardRecord,
    Died,
    Dump,
    Exit,
    Freeze,
    Frozen,
    Hello,
    Layout,
    NodeStalled,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    Raised,
    Share,
    Written,
)
from adaptor.protocol.naming import FileEntry
from tests.unit.traces import Trace, replay

TRACES = sorted((Path(__file__).parent / "controller_traces").glob("*.txt"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    expected = path.read_text()
    replayed = replay(expected)
    if os.environ.get("UPDATE_TRACES"):
        path.write_text(replayed)
    assert replayed == expected


def test_twenty_thousand_ranks() -> None:
    """A kill in a job of 2,500 nodes: the work grows linearly with the ranks, not with their square."""
    ranks, ranks_per_node, shards = 20_000, 8, 50
    job = Controller(ranks, 120.0, ("store", 1, b""))
    for node in range(ranks // ranks_per_node):
        job.handle(AgentHello(node, tuple(range(node * ranks_per_node, (node + 1) * ranks_per_node))), 0.0)
    for rank in range(ranks):  # two copies of each shard, half of the ranks apart
        share = Share(f"g{rank % (ranks // 2) // shards}", rank % shards, shards)
        job.handle(Hello(rank, 1), 0.0)
        job.handle(Layout(rank, (share,), "/save", 0, "same"), 0.0)
    orders = job.handle(Died(7, -9, 0.0, BoardRecord(7)), 1.0)
    orders_sent = [order.message for _, order in orders if isinstance(order, Addressed)]
    assert orders_sent == [Freeze(1)] * (ranks - 1)
    assert not any(gc.is_tracked(order) for _, order in orders), "walked through again and again while made"
    for rank in range(ranks):
        if rank != 7:
            orders = job.handle(Frozen(rank, 1, BoardRecord(rank, 1, Phase.RUNNING, 5, 5, 5)), 2.0)
    ((node, order),) = orders
    assert isinstance(order, Prepare)
    orders = job.handle(Prepared(node, 1, "/save/iter_0000005_tmp", ""), 3.0)
    dumps = {order.rank: order.message for _, order in orders if isinstance(order, Addressed)}
    assert len(dumps) == ranks // 2
    assert 7 not in dumps
    assert ranks // 2 + 7 in dumps
    for rank, dump in dumps.items():
        assert isinstance(dump, Dump)
        (group,) = dump.groups
        if group.writer == rank:
            orders = job.handle(Written(rank, 1, 1, group.group, (FileEntry(group.group, 1, None),)), 4.0)
    ((node, published),) = orders
    assert isinstance(published, Publish)
    job.handle(Published(node, 1, 5, "/save"), 5.0)
    assert job.verdict is not None
    assert (job.verdict.outcome, job.verdict.step) == ("saved", 5)


def test_nodes_that_stand_still_for_long_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an evaluation thousands of nodes repeat their report; all are evaluated only at a change."""
    looks: list[int] = []
    hang = hang_detector.hang
    monkeypatch.setattr(hang_detector, "hang", lambda nodes: looks.append(1) or hang(nodes))
    nodes = range(100)
    job = Controller(len(nodes), 120.0, ("store", 1, b""))
    for node in nodes:
        job.handle(AgentHello(node, (node,)), 0.0)
        job.handle(Hello(node, 1), 0.0)
    for seconds in (120.0, 128.0, 136.0):
        for node in nodes:
            assert job.handle(NodeStalled(node, seconds, -1, 5), seconds) == []
    assert len(looks) == 1
    job.handle(NodeStalled(7, 144.0, 5, -1), 144.0)
    assert job.incident is not None


def _ranks_that_show(orders: Orders) -> list[int]:
    addressed = [order for _, order in orders if isinstance(order, Addressed)]
    return [order.rank for order in addressed if isinstance(order.message, Exit) and order.message.blamed]


def _job(world_size: int) -> Controller:
    job = Controller(world_size, 120.0, ("store", 1, b""))
    job.handle(AgentHello(0, tuple(range(world_size))), 0.0)
    for rank in range(world_size):
        job.handle(Hello(rank, 1000 + rank), 0.0)
    return job


def test_where_nobody_is_blamed_the_first_that_raised_shows_it() -> None:
    """Otherwise the traceback of the only known error would be lost."""
    job = _job(3)
    job.handle(Raised(2, "RuntimeError: Connection closed by peer", 1), 1.0)
    job.handle(Raised(1, "RuntimeError: Connection closed by peer", 1), 1.0)
    assert _ranks_that_show(job.give_up("KeyError: 'a mistake'")) == [2]
    assert _ranks_that_show(job.handle(Hello(2, 2002), 2.0)) == [2], "its hello was late"
    assert _ranks_that_show(job.handle(Hello(1, 2001), 2.0)) == []


def test_a_termination_request_names_the_ttprun_that_got_it() -> None:
    job = Controller(2, 120.0, ("store", 1, b""))
    for node in (0, 1):
        job.handle(AgentHello(node, (node,), host=f"host{node}", pid=70 + node), 0.0)
        job.handle(Hello(node, 1000 + node), 0.0)
    job.handle(AgentTerminationRequested(1, "SIGTERM"), 1.0)
    assert job.verdict is not None
    fault = job.verdict.fault
    assert (job.verdict.cause_rank, fault.host, fault.pid) == (-1, "host1", 71)


def test_exceptions_after_a_termination_request_are_not_shown() -> None:
    job = _job(2)
    job.handle(AgentTerminationRequested(0, "SIGTERM"), 1.0)
    job.handle(Raised(1, "RuntimeError: Connection closed by peer", 1), 1.0)
    assert _ranks_that_show(job.give_up("KeyError: 'a mistake'")) == []


def test_the_line_of_an_open_incident() -> None:
    """At once when the step is saved, and before where the save takes long."""
    trace = Trace()

    def report(*lines: str) -> str:
        for line in lines:
            list(trace.say(line))
        return trace.controller.open_words()

    assert report("job nodes=2 shards=2 online=60", "at 100", "dying 3") == ""
    frozen = [f"frozen {rank} running 5" for rank in (0, 1, 2)]
    assert report(*frozen) == "", "its status is not known"
    assert report("died 3 -9", "prepared", "at 101.9") == ""
    assert report("at 102") == "rank 3 was ended by SIGKILL; step 5 is being saved"
    before_restart = report("written 0", "at 102.5", "published")
    assert before_restart == "rank 3 was ended by SIGKILL; step 5 is saved (2.5 s); a new process is started"
    joined = [f"joined {rank}" for rank in (0, 1, 2, 3)]
    assert report("hello 3 pid=7", "layout 3 same", "at 110") == before_restart
    assert report(*joined) == ""
    survivors = ["frozen 0 running 8", "frozen 1 running 8"]
    lost = report("agent-lost 1", *survivors, "prepared", "written 0", "published")
    assert lost == "node 1 is lost; step 8 is saved (0 ms); a spare node is awaited"
    assert report("not-filled 1") == ""


def test_an_open_incident_that_restarts_all_ranks_says_nothing_more() -> None:
    trace = Trace()
    for line in ("job nodes=1 shards=1", "died 1 -9", "frozen 0 running 5", "prepared", "written 0"):
        list(trace.say(line))
    assert trace.controller.open_words() == ""
