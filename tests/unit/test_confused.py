"""Nonsense from an agent that knows the secret: valid messages with any values, in any order, repeated.

The messages take the path of `ControllerHost`. The controller must go on, and give a verdict in the end.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptor.controller.controller import Controller, Orders
from adaptor.launchers.control.controller_host import AgentRegistry
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.protocol import messages, wire
from adaptor.protocol.messages import (
    AgentHello,
    BoardRecord,
    Died,
    Frozen,
    Hello,
    Layout,
    NodeResumed,
    NodeStalled,
    Phase,
    Prepared,
    Progress,
    Published,
    PublishFailed,
    Raised,
    Share,
    TerminationRequested,
    Verdict,
    WriteFailed,
    Written,
)
from adaptor.protocol.naming import FileEntry
from tests.unit.any_message import any_of

EXAMPLES = int(os.environ.get("TTP_FUZZ_EXAMPLES", "100"))
# Numbers that occur in this job, so that nonsense passes the first comparison.
SMALL = st.integers(-1, 6)
TEXT = st.sampled_from(["", "g", "h", "/save", "SIGTERM", "SIGNONE", "same"])
SHARES = st.lists(st.builds(Share, TEXT, st.integers(0, 3), st.integers(1, 3), st.booleans()), max_size=3)
BOARDS = st.builds(
    BoardRecord,
    rank=SMALL,
    phase=st.integers(0, max(Phase)),
    oldest=SMALL | st.integers(),
    finished=SMALL | st.integers(),
    ahead=SMALL,
)
FILES = st.lists(st.builds(FileEntry, TEXT, SMALL, TEXT, SMALL), max_size=2).map(tuple)
RANKS = st.integers(0, 4)
FOLDERS = st.builds("{}/iter_000000{}_tmp".format, st.sampled_from(["/save", "/home"]), st.integers(0, 2))
NEARLY = st.one_of(
    st.builds(AgentHello, st.integers(0, 2), st.lists(RANKS, max_size=3).map(tuple)),
    st.builds(Hello, RANKS, SMALL),
    st.builds(Layout, RANKS, SHARES.map(tuple), TEXT, SMALL, st.just("same")),
    st.builds(Raised, RANKS, TEXT, SMALL),
    st.builds(TerminationRequested, RANKS, TEXT),
    st.builds(Frozen, RANKS, SMALL, BOARDS),
    st.builds(Written, RANKS, SMALL, SMALL, TEXT, FILES),
    st.builds(WriteFailed, RANKS, SMALL, SMALL, TEXT, TEXT, BOARDS),
    st.builds(Died, RANKS, st.sampled_from([-64, -9, 0, 3]), st.floats(), BOARDS),
    st.builds(Prepared, st.integers(0, 2), SMALL, TEXT | FOLDERS, TEXT, SMALL),
    st.builds(Published, st.integers(0, 2), SMALL, SMALL, TEXT, SMALL),
    st.builds(PublishFailed, st.integers(0, 2), SMALL, TEXT, SMALL),
    st.builds(NodeStalled, st.integers(0, 2), st.floats(), st.integers(-1, 8), st.integers(-1, 8)),
    st.builds(NodeResumed, st.integers(0, 2)),
    st.builds(Progress, st.integers(0, 2), SMALL),
)
ANY: st.SearchStrategy[Any] = st.one_of(NEARLY, NEARLY, any_of(messages.FromAgent))


class ConfusedJob:
    """Two nodes with two ranks each; both hold every shard of group `g`. Node 1 is confused."""

    def __init__(self, folder: Path) -> None:
        self.registry = AgentRegistry(4, 2)
        self.report = IncidentReport(JobFiles(str(folder)))
        self.controller = Controller(4, 120.0, ("store", 1, b""))
        self.now = 0.0
        for node in (0, 1):
            self.take(node, AgentHello(node, (2 * node, 2 * node + 1)))
        for rank in range(4):
            self.take(rank // 2, Hello(rank, 1))
            self.take(rank // 2, Layout(rank, (Share("g", rank % 2, 2),), "/save", 0, "same"))

    def take(self, node: int, message: Any) -> None:
        """Take a message as the controller host does after it came over a connection."""
        try:
            heard = wire.from_agent(wire.frame(message)[4:])
        except (msgspec.DecodeError, OverflowError):  # no connection could carry it
            return
        if not self.registry.rejection_reason(node, heard):
            self.report.record_message(node, heard)
            self._deliver(self.controller.handle(heard, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self._deliver(self.controller.tick(self.now))

    def end(self) -> Verdict:
        """Kill node 0 and let nobody answer; return the verdict."""
        for rank in (0, 1):
            self.take(0, Died(rank, -9, 0.0, BoardRecord(rank)))
        for _ in range(4):
            self.tick(130.0)
        self.report.close()  # a thread writes the report
        assert self.controller.verdict is not None
        return self.controller.verdict

    def _deliver(self, orders: Orders) -> None:
        for node, order in orders:
            assert node in (0, 1)
            wire.frame(order)
            self.report.record_order(node, getattr(order, "rank", None), getattr(order, "message", order))


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(ANY, st.sampled_from([0.0, 0.0, 0.0, 1.0, 70.0])), max_size=30))
def test_nonsense_of_a_node(messages: list[tuple[Any, float]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = ConfusedJob(Path(folder))
        for message, seconds in messages:
            job.take(1, message)
            job.tick(seconds)
        assert not {0, 1} & job.controller.membership.dead.keys()
        assert [job.controller.membership.node_of[rank] for rank in (0, 1)] == [0, 0]
        job.end()


@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(st.lists(NEARLY, max_size=10))
def test_a_repeated_message_changes_nothing(messages: list[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        once, twice = ConfusedJob(Path(folder)), ConfusedJob(Path(folder))
        for message in messages:
            once.take(1, message)
            for _ in range(2):
                twice.take(1, message)
        assert once.end() == twice.end()
