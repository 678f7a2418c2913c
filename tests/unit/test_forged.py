"""Answers from a node that was not asked, and a hello that claims the place of a lost node."""

from __future__ import annotations

from typing import Any

import pytest

from adaptor.controller.controller import Controller, Orders
from adaptor.launchers.control.controller_host import AgentRegistry
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    BoardRecord,
    Died,
    Dump,
    FromAgent,
    Frozen,
    Hello,
    Layout,
    Phase,
    PlacesFilled,
    Prepare,
    Prepared,
    Publish,
    Published,
    PublishFailed,
    ReplayComplete,
    Share,
    Verdict,
    Written,
)
from adaptor.protocol.naming import FileEntry

STEP = 5
FOLDER = f"/save/iter_{STEP:07d}_tmp_0f3a"
FILE = FileEntry("model_optim_rng.pt", 1, "00", 1)


class AskedJob:
    """Three nodes with two ranks each; rank 5 has died, and node 0 gets all orders."""

    def __init__(self) -> None:
        self.controller = Controller(6, 120.0, ("store", 1, b""))
        self.registry = AgentRegistry(6, 3, self.controller.membership.lost)
        for node in range(3):
            self.say(node, AgentHello(node, (2 * node, 2 * node + 1)))
        for rank in range(6):
            self.say(rank // 2, Hello(rank, 1), Layout(rank, (Share("g", 0, 1),), "/save", 0, "same"))
        self.say(2, Died(5, -9, 0.0, BoardRecord(5)))

    def say(self, node: int, *messages: FromAgent) -> Orders:
        """Pass on messages of the agent of `node`, as the controller host does."""
        orders: Orders = []
        for message in messages:
            if not self.registry.rejection_reason(node, message):
                orders += self.controller.handle(message, 1.0)
        return orders

    def freeze(self) -> Orders:
        board = [BoardRecord(rank, 1, Phase.RUNNING, STEP, STEP, STEP) for rank in range(5)]
        return [order for rank in range(5) for order in self.say(rank // 2, Frozen(rank, 1, board[rank]))]

    @property
    def verdict(self) -> Verdict:
        assert self.controller.verdict is not None
        return self.controller.verdict


def kinds(orders: Orders) -> list[type[Any]]:
    return [type(order.message if isinstance(order, Addressed) else order) for _, order in orders]


@pytest.mark.robustness(
    "C1", "an agent answers for the one that was asked, or names another folder", "its answer is ignored"
)
def test_answers_count_only_from_the_node_that_was_asked() -> None:
    job = AskedJob()
    ((asked_node, order),) = job.freeze()
    assert (asked_node, type(order)) == (0, Prepare)
    for node in (1, 2):
        assert job.say(node, Prepared(node, 1, FOLDER, ""), Prepared(node, 1, "", "no space")) == []
        assert job.say(node, Published(node, 1, STEP, "/save"), PublishFailed(node, 1, "no")) == []
        assert job.say(node, Prepared(asked_node, 1, FOLDER, "")) == []
    for folder in (
        "/home/user/.ssh",
        f"/home/iter_{STEP:07d}_tmp_0f3a",
        f"/save/iter_{STEP:07d}",
        f"/save/iter_{STEP + 1:07d}_tmp_0f3a",
        f"/save/iter_{STEP:07d}_tmp2_0f3a",
        f"/save/../home/iter_{STEP:07d}_tmp",
    ):
        assert job.say(asked_node, Prepared(asked_node, 1, folder, "")) == [], folder
    ((_, dump),) = job.say(asked_node, Prepared(asked_node, 1, FOLDER, ""))
    assert isinstance(dump, Addressed)
    assert isinstance(dump.message, Dump)
    assert dump.message.folder == FOLDER
    writer = dump.message.groups[0].writer
    assert job.say(1, Published(1, 1, STEP, "/save"), Written(2, 1, 1, "g", (FILE,))) == []
    for path in ("/etc/passwd", "../../.bashrc", "", "a/../../b"):
        assert job.say(0, Written(writer, 1, 1, "g", (FileEntry(path, 1, "00", 1),))) == [], path
    ((asked_node, publish),) = job.say(0, Written(writer, 1, 1, "g", (FILE,)))
    assert (asked_node, type(publish)) == (0, Publish)
    for node in (1, 2):
        assert job.say(node, Published(node, 1, STEP, "/save"), PublishFailed(node, 1, "no")) == []
    assert job.say(0, Published(0, 1, STEP - 1, "/save"), Published(0, 1, STEP, "/save", 7)) == []
    job.say(0, Published(0, 1, STEP, "/save"))
    assert (job.verdict.outcome, job.verdict.step) == ("saved", STEP)


@pytest.mark.robustness("C1", "an agent gives away the place of a node that is there", "nobody gets it")
def test_a_place_is_given_by_node_0_and_only_that_of_a_lost_node() -> None:
    job = AskedJob()
    members = job.controller.membership
    job.registry = AgentRegistry(6, 3, members.lost, members.expected)
    for node in range(3):
        assert job.registry.rejection_reason(node, AgentHello(node, (2 * node, 2 * node + 1))) == ""
    assert job.say(0, PlacesFilled(0, 1, (2,), {2: "a"})) == []
    reason = "came as a node that was there already"
    assert job.registry.rejection_reason(2, AgentHello(2, (4, 5), owner="a")) == reason
    job.controller.handle(AgentLost(2), 1.0)
    job.say(1, PlacesFilled(1, 1, (2,), {2: "a"}), PlacesFilled(0, 1, (2,), {2: "a"}))
    assert job.registry.rejection_reason(2, AgentHello(2, (4, 5), owner="a")) == reason
    job.say(0, PlacesFilled(0, 1, (2,), {2: "a"}))
    assert job.registry.rejection_reason(2, AgentHello(2, (4, 5))) == reason
    assert job.registry.rejection_reason(2, AgentHello(2, (4, 5), owner="a")) == ""


@pytest.mark.robustness("C1", "an agent comes in a place that a spare node has taken", "it is rejected")
def test_the_place_that_a_spare_node_has_taken() -> None:
    """The next controller learns the owner from the previous controller; being the first to connect gives no
    advantage.
    """
    job = AskedJob()
    lost_hello, spare = AgentHello(2, (4, 5)), AgentHello(2, (4, 5), owner="a")
    job.registry = AgentRegistry(6, 3)
    job.registry.succeed([AgentHello(0, (0, 1)), spare])
    taken = "came as a node whose place another one has"
    assert job.registry.rejection_reason(2, lost_hello) == taken
    assert job.registry.rejection_reason(2, AgentHello(2, (4, 5), owner="b")) == taken
    assert job.registry.rejection_reason(2, spare) == ""
    assert job.registry.rejection_reason(1, AgentHello(1, (2, 3))) == "", "nothing is known of it"
    assert job.registry.rejection_reason(0, AgentHello(0, (0, 1))) == ""


@pytest.mark.robustness("C1", "an agent comes in the place of a lost node", "it is told the verdict only")
def test_the_place_of_a_lost_node_stays_lost() -> None:
    """Also after a take-over by a controller that never saw the lost agent."""
    job = AskedJob()
    job.controller.handle(AgentLost(2), 1.0)
    job.registry = AgentRegistry(6, 3, job.controller.membership.lost)
    hello = AgentHello(2, (4, 5))
    assert job.registry.rejection_reason(2, hello) == "", "it is told the verdict"
    assert job.registry.rejection_reason(2, Hello(4, 1)) == "spoke for a node that is lost"
    job.registry = AgentRegistry(6, 3, job.controller.membership.lost)
    assert job.say(2, hello, Hello(4, 1), Frozen(4, 1, BoardRecord(4, 1, Phase.RUNNING, 9, 9, 9))) == []
    assert 2 not in job.controller.membership.agents
    assert 4 not in job.controller.membership.alive
    job.registry = AgentRegistry(6, 3, job.controller.membership.lost)
    for node in (0, 1):
        job.say(node, AgentHello(node, (2 * node, 2 * node + 1)), ReplayComplete(node))
    ((asked_node, _),) = job.freeze()
    ((_, dump),) = job.say(asked_node, Prepared(asked_node, 1, FOLDER, ""))
    assert isinstance(dump, Addressed)
    writer = dump.message.groups[0].writer  # type: ignore[union-attr]
    job.say(writer // 2, Written(writer, 1, 1, "g", (FILE,)))
    orders = job.say(asked_node, Published(asked_node, 1, STEP, "/save"))
    assert [(node, type(order)) for node, order in orders if node == 2] == [(2, Verdict)]
    assert job.verdict.step == STEP
