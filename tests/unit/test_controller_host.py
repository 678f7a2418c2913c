"""Agents of several nodes and the controller: over loopback TCP, with strangers in between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adaptor.checkpoint import publish
from adaptor.controller import failover
from adaptor.errors import StartError
from adaptor.launchers.agent import worker_watch
from adaptor.launchers.agent.node import Node
from adaptor.launchers.control import controller_client
from adaptor.launchers.control.agent_connections import MOST, AgentListener, RejectedConnections, read_hello
from adaptor.launchers.control.controller_client import ControllerClient
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.protocol import wire
from adaptor.protocol.messages import (
    AgentHello,
    AgentTerminationRequested,
    BoardRecord,
    ControllerToAgent,
    Died,
    Raised,
    TimelineEvent,
    Verdict,
)
from adaptor.worker.processor import EXIT_SURVIVOR
from tests import waiting
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.agents import Agent
from tests.unit.arrivals import Arrivals, Calls
from tests.unit.nodes import Job, controller_host_of, job, stop
from tests.unit.threads import LONG_S, Thread

__all__ = ["job"]

FIRST = 11


@pytest.fixture
def two_nodes(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Two nodes with one worker each and no time limit for the wait for the other node."""
    monkeypatch.setattr(worker_watch, "SHUTDOWN_GRACE_S", 10 * LONG_S)
    port = str(free_port())
    job.begin(2, [job.node(TTP_PORT=port), job.node(TTP_PORT=port)])
    return job


@pytest.fixture
def two_plain_nodes(job: Job) -> Job:
    """Two nodes without TLS, as in a trusted network."""
    port = str(free_port())
    job.begin(2, [job.node(TTP_PORT=port, TTP_TLS="plain"), job.node(TTP_PORT=port, TTP_TLS="plain")])
    return job


def client_of(node: Node) -> ControllerClient:
    assert node.control.client is not None
    return node.control.client


def port_of(node: Node) -> int:
    """Return the port of a node's listener."""
    endpoint = client_of(node).listener.endpoint
    assert endpoint is not None
    return endpoint.port


def lose(node: Node) -> None:
    """A node that is lost takes no leave."""
    controller_host = client_of(node).controller_host
    if controller_host is not None:
        node.control.thread.loop.call_soon_threadsafe(controller_host._sends.clear)
    node.close()


def of_both(job: Job) -> list[tuple[str, int, int]]:
    verdicts = [job.verdict(node) for node in (0, 1)]
    assert verdicts[0] == verdicts[1]
    return [(verdicts[0].outcome, verdicts[0].step, verdicts[0].exit_code)]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_death_on_either_node(two_nodes: Job, victim: int) -> None:
    job = two_nodes
    job.train("step", "step")
    job.workers[victim].process.kill()
    assert of_both(job) == [("saved", FIRST + 1, 137)]
    assert job.saved() == {"g.txt": f"{FIRST + 1} {FIRST + 1} {(FIRST + 1) * 4} 1024.0"}
    assert job.statuses() == {victim: -signal.SIGKILL, 1 - victim: EXIT_SURVIVOR}


def test_a_death_with_tls_between_the_nodes(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, with workers started anew."""
    monkeypatch.setattr(worker_watch, "SHUTDOWN_GRACE_S", 10 * LONG_S)
    signer, port = Authority(tmp_path / "signer"), str(free_port())
    nodes = [job.node(TTP_PORT=port, **signer.settings(f"node{number}")) for number in (0, 1)]
    for victim, steps in ((1, 1), (0, 2)):
        job.begin(2, nodes)
        job.train(*["step"] * steps)
        job.workers[victim].process.kill()
        assert of_both(job) == [("saved", FIRST + steps - 1, 137)]
        job.end()


def test_a_node_with_a_certificate_of_another_signer(job: Job, tmp_path: Path) -> None:
    """The node reports the wrong certificate at once and starts no workers."""
    port = str(free_port())
    signers = [Authority(tmp_path / name) for name in ("ours", "theirs")]
    nodes = [job.node(TTP_PORT=port, **signer.settings()) for signer in signers]
    with pytest.raises(StartError, match="cannot be reached: certificate"):
        job.begin(2, nodes)
    assert list(job.workers) == [0]


def test_nothing_of_one_machine_can_be_reached_from_another(two_nodes: Job) -> None:
    """Neither certificates nor `plain`: all that listens does so on loopback."""
    endpoints = [client_of(node).listener.endpoint for node in two_nodes.nodes]
    names = {row.split()[-1] for row in Path("/proc/net/unix").read_text().splitlines()}
    assert [
        (f"@{endpoint.address}" in names, endpoint.port) for endpoint in endpoints if endpoint is not None
    ] == [(True, 0)] * 2
    assert controller_host_of(two_nodes.nodes[0]).store.port == 0


def test_the_secret_is_seen_nowhere(two_plain_nodes: Job) -> None:
    """Not in the environment of a worker, on a command line or in the log."""
    job = two_plain_nodes
    (secret,) = (word for word in client_of(job.nodes[0]).secret.split() if len(word) == 64)
    job.train("step")
    worker = Path(f"/proc/{job.workers[0].process.pid}")
    readable = [(worker / name).read_bytes() for name in ("environ", "cmdline")]
    job.workers[1].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]
    logs = [path.read_bytes() for path in job.logs.rglob("*") if path.is_file()]
    assert logs
    assert not any(secret in text for text in (*readable, *logs))


def test_an_exception_on_the_other_node(two_nodes: Job) -> None:
    two_nodes.train("step")
    two_nodes.workers[1].send("exit 5")
    assert of_both(two_nodes) == [("saved", FIRST, 5)]
    assert two_nodes.statuses() == {0: EXIT_SURVIVOR, 1: 5}


def test_a_lost_node_is_the_death_of_its_workers(two_nodes: Job) -> None:
    job = two_nodes
    job.train("step")
    lost = job.nodes.pop()
    lost.close()
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step) == ("saved", FIRST)
    assert verdict.line.startswith("node 1 is lost; ")
    assert job.workers[0].status() == EXIT_SURVIVOR


def test_the_loss_of_the_controller_is_survived(two_nodes: Job) -> None:
    """The next node becomes the controller, and saves with the remaining workers."""
    job = two_nodes
    job.train("step")
    lose(job.nodes.pop(0))
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.exit_code, verdict.leaves) == ("saved", FIRST, 137, (0,))
    assert verdict.line.startswith(f"node 0 is lost; step {FIRST} is saved")
    assert job.workers[1].status() == EXIT_SURVIVOR


def test_it_is_not_over_before_the_verdict(two_nodes: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 1 has finished when node 0 is lost, and searches for the saved checkpoint: the job must not end as
    a success.
    """
    looks, may_look = threading.Event(), threading.Event()
    find = publish.find

    def slow(*arguments: Any) -> int:
        looks.set()
        assert may_look.wait(LONG_S)
        return find(*arguments)

    monkeypatch.setattr(publish, "find", slow)
    job = two_nodes
    job.train("step")
    job.workers[1].send("exit 0")
    assert job.workers[1].status() == 0
    waiting.until(
        lambda: 1 in controller_host_of(job.nodes[0]).controller.membership.dead, "its end is known"
    )
    lose(job.nodes.pop(0))
    assert looks.wait(LONG_S)
    (node,) = job.nodes
    assert controller_host_of(node).controller.membership.everyone_is_dead
    assert not node.over
    may_look.set()
    assert job.verdict().outcome == "lost"


def test_the_node_that_takes_over_is_lost_as_well(job: Job) -> None:
    """During its incident: rank 1 does not answer until its agent is lost."""
    port = str(free_port())
    nodes = [job.node(TTP_PORT=port) for _ in range(3)]
    job.begin(3, nodes)
    job.train("step")
    stop(job.workers[1].process.pid)
    lose(job.nodes.pop(0))
    waiting.until(lambda: client_of(nodes[1]).controller_host is not None, "node 1 has taken over")
    waiting.until(
        lambda: 2 in controller_host_of(nodes[1]).controller.membership.agents, "node 2 has come to it"
    )
    lose(job.nodes.pop(0))
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.incident) == ("saved", FIRST, 3)
    assert verdict.line.startswith("node 0 is lost, node 1 is lost; ")
    assert job.saved() == {"g.txt": f"{FIRST} {FIRST} {FIRST * 4} 1024.0"}


def test_a_verdict_that_reached_only_one_node_stands(job: Job) -> None:
    port = str(free_port())
    nodes = [job.node(TTP_PORT=port) for _ in range(3)]
    job.begin(3, nodes)
    job.train("step")
    given_verdict = Verdict(
        incident=1,
        outcome="saved",
        step=FIRST,
        line="as it was",
        cause_rank=0,
        exit_code=3,
        save_folder=str(job.save),
    )
    loop = nodes[0].control.thread.loop
    loop.call_soon_threadsafe(lambda: controller_host_of(nodes[0])._sends[2]([given_verdict]))
    waiting.until(lambda: nodes[2].control.verdict == given_verdict, "node 2 has been told")
    lose(job.nodes.pop(0))
    verdict = job.verdict()
    assert (verdict.outcome, verdict.line, verdict.exit_code) == ("saved", "as it was", 3)
    assert nodes[2].control.verdict == given_verdict
    assert job.workers[1].status() == EXIT_SURVIVOR


def test_nobody_is_left_to_take_over(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node that would have has gone before."""
    monkeypatch.setattr(failover, "STANDBYS", 1)
    monkeypatch.setattr(failover, "STANDBYS", 1)
    monkeypatch.setattr(worker_watch, "EXIT_GRACE_S", 0.1)
    port = str(free_port())
    nodes = [job.node(TTP_PORT=port) for _ in range(3)]
    job.begin(3, nodes)
    job.train("step")
    stop(job.workers[2].process.pid)
    lose(job.nodes.pop(1))
    waiting.until(lambda: controller_host_of(nodes[0]).controller.incident is not None, "it is known")
    lose(job.nodes.pop(0))
    verdict = job.verdict()
    assert verdict.line == "the controller's node is lost; nothing more can be saved from node 2"
    assert job.workers[2].status() == -signal.SIGKILL


def test_a_node_loses_the_controller_and_others_do_not(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides of the cut save, with a controller each, in one folder; neither harms the other."""
    for module in (controller_client, controller_client):
        monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    port = str(free_port())
    nodes = [job.node(TTP_PORT=port) for _ in range(3)]
    job.begin(3, nodes)
    job.train("step", "step")
    refused = TimelineEvent(-1, 0, 0.0, "of no rank")  # no message: nothing more is read after it
    nodes[2].control.thread.loop.call_soon_threadsafe(lambda: client_of(nodes[2]).send(refused))
    lines = [job.verdict(node).line for node in range(3)]
    kept = f"step {FIRST + 1} is saved, no finished step is lost"
    assert lines == [f"node 2 is lost; {kept}"] * 2 + [f"node 0 is lost, node 1 is lost; {kept}"]
    assert job.saved() == {"g.txt": f"{FIRST + 1} {FIRST + 1} {(FIRST + 1) * 4} 1024.0"}
    assert sorted(path.name for path in job.save.iterdir()) == [
        f"iter_{FIRST + 1:07d}",
        "latest_checkpointed_iteration.txt",
    ]
    assert job.statuses() == dict.fromkeys(range(3), EXIT_SURVIVOR)


def test_the_report_is_where_the_verdict_came_from(two_nodes: Job) -> None:
    """The last line names the node of the report, even if the node has left."""
    job = two_nodes
    job.train("step")
    job.workers[1].send("exit 5")
    of_both(job)
    assert Path(job.nodes[0].control.report_path).parents[2] == job.logs
    lose(job.nodes.pop(0))
    (node,) = job.nodes
    waiting.until(lambda: client_of(node).succession.is_mine, "node 1 has noticed that")
    assert node.control.report_path == "on node 0"


def test_a_node_that_has_finished_does_not_end_the_others(two_nodes: Job) -> None:
    job = two_nodes
    job.train("step")
    job.nodes.pop(0).close()
    job.workers[1].process.kill()
    verdict = job.verdict()
    assert verdict.outcome == "lost"
    assert verdict.line.startswith("rank 1 ended with status -9 after node 0 had finished")
    assert job.nodes[0].control.report_path == ""  # there is none


def test_a_death_that_the_controller_does_not_hear_any_more(two_nodes: Job) -> None:
    """The controller has left when the death is reported; the node reports it afterwards."""
    job = two_nodes
    job.train("step")
    controller_host_of(job.nodes[0]).receive = lambda *args: True  # type: ignore[method-assign]
    job.workers[1].process.kill()
    waiting.until(
        lambda: any(isinstance(message, Died) for message in client_of(job.nodes[1]).succession.said),
        "node 1 has told it",
    )
    job.nodes.pop(0).close()
    assert job.verdict().line.startswith("rank 1 ended with status -9 after node 0 had finished")


def test_a_node_that_leaves_in_the_middle_of_an_incident(two_nodes: Job) -> None:
    """Nobody asks the others' workers for their state any more, until the next node does."""
    job = two_nodes
    job.train("step", "step")
    stop(job.workers[0].process.pid)  # so that the incident cannot be over
    job.nodes[0].leave("SIGTERM", 0.0)
    waiting.until(lambda: controller_host_of(job.nodes[0]).controller.incident is not None, "the incident")
    job.nodes.pop(0).close()
    verdict = job.verdict()
    assert (verdict.outcome, verdict.step, verdict.incident) == ("saved", FIRST + 1, 2)


@pytest.mark.parametrize("leaving", [0, 1])
def test_a_node_without_workers_leaves_after_the_verdict(
    leaving: int, two_nodes: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only worker of the node is dead; the other node publishes the files of that worker."""
    publishes, may_publish = threading.Event(), threading.Event()
    publish_now = publish.publish

    def held(*arguments: Any) -> None:
        publishes.set()
        assert may_publish.wait(LONG_S)
        publish_now(*arguments)

    monkeypatch.setattr(publish, "publish", held)
    job = two_nodes
    job.train("step", "step")
    job.workers[leaving].process.kill()
    assert publishes.wait(LONG_S)
    node, failures = job.nodes[leaving], controller_host_of(job.nodes[0]).controller._failures
    waiting.until(lambda: not node.control.workers.running, "the end of its worker is known")

    def leave() -> Verdict | None:
        node.leave("SIGTERM", LONG_S)
        return node.control.verdict

    with Thread(leave) as thread:
        waiting.until(lambda: failures.told_to_end or not thread.running, "the controller knows of it")
        assert thread.running
        assert node.is_needed
        may_publish.set()
        verdict = thread.result()
    assert not node.is_needed
    assert verdict == job.verdict(1 - leaving)
    assert (verdict.outcome, verdict.step, verdict.incident) == ("saved", FIRST + 1, 1)


def test_a_second_generation_finds_the_new_controller(two_nodes: Job) -> None:
    job = two_nodes
    job.train("step")
    job.workers[0].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]
    job.end()
    job.begin(2)
    job.train("step", "step")
    job.workers[1].process.kill()
    assert of_both(job) == [("saved", FIRST + 1, 137)]


def test_a_node_starts_no_worker_before_it_knows_the_way(job: Job) -> None:
    """A worker started earlier would connect to another controller after the first one is lost."""
    port, store, order = str(free_port()), dist.HashStore(), list[str]()
    nodes = [job.node(TTP_PORT=port) for _ in range(3)]
    for number in (0, 2):
        nodes[number].begin([number], number, 3, 3, store, "127.0.0.1")
    nodes[0].meet()

    def meet() -> None:
        nodes[2].meet()
        order.append("node 2 has met the others")

    with Thread(meet):
        waiting.until(
            lambda: controller_host_of(nodes[0]).controller.membership.agents == {0, 2}, "node 2 is known"
        )
        order.append("node 1 comes")
        nodes[1].begin([1], 1, 3, 3, store, "127.0.0.1")
    assert order == ["node 1 comes", "node 2 has met the others"]


def test_strangers_do_not_disturb_a_job(two_plain_nodes: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the gate waits for, while an incident begins and ends; the log tells of them."""
    monkeypatch.setattr(worker_watch, "SHUTDOWN_GRACE_S", 10 * LONG_S)
    job = two_plain_nodes
    port = port_of(job.nodes[0])
    strangers = [socket.create_connection(("127.0.0.1", port), LONG_S) for _ in range(MOST + 10)]
    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n" + secrets.token_bytes(100))
    strangers[-2].close()
    job.train("step")
    assert job.nodes[0].control.verdict is None
    job.workers[0].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]
    for stranger in strangers:
        stranger.close()
    counted = client_of(job.nodes[0])._rejected.counted
    waiting.until(lambda: sum(counted.values()) == len(strangers), "each of them is counted")
    job.close()
    job.nodes = []
    (log,) = job.logs.glob("ttp-agent-*.log")
    assert f"{len(strangers)} rejected connections at the controller's port so far: " in log.read_text()


@pytest.mark.robustness(
    "C3",
    "hundreds of connections that have proved the secret wait at a standby",
    "only the newest of each node is kept",
)
def test_one_connection_of_each_node_waits_at_a_standby(two_plain_nodes: Job) -> None:
    job = two_plain_nodes
    standby = client_of(job.nodes[1])
    port, secret = port_of(job.nodes[1]), standby.secret.hex()

    async def act() -> None:
        agents = [await Agent.proven(port, secret) for _ in range(40)]
        for agent in agents[:20]:
            agent.say(AgentHello(0, (0,)))
        for agent in agents[20:]:
            agent.say(AgentHello(7, (0,)))
        shut_out = [asyncio.ensure_future(agent.is_shut_out()) for agent in agents]
        for finished in itertools.islice(asyncio.as_completed(shut_out), 39):
            await finished
        assert [task.done() for task in shut_out[20:]] == [True] * 20
        assert len(standby.listener.waiting) == 1
        for task in shut_out:
            task.cancel()
        for agent in agents:
            await agent.close()

    asyncio.run(asyncio.wait_for(act(), LONG_S))
    job.train("step")
    job.workers[0].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]


# the controller host alone


class Open:
    """A controller host for two nodes, and its listener."""

    def __init__(self, folder: Path, port: int) -> None:
        self.rejected = RejectedConnections("the gate")
        secret = secrets.token_bytes(32)
        self.secret = secret.hex()
        self.controller_host = ControllerHost(
            0, 2, 2, 10.0, "127.0.0.1", IncidentReport(JobFiles(str(folder))), self.rejected
        )
        self.listener = AgentListener(secret, None, self.rejected, self.controller_host.serve, read_hello)
        self.port = self.listener.listen("127.0.0.1", port)
        self.controller_host.start()

    async def close(self) -> None:
        await self.controller_host.close()
        await self.listener.close()
        self.rejected.close()


@contextlib.asynccontextmanager
async def host_of_two_nodes(folder: Path) -> AsyncIterator[Open]:
    """Yield an open controller host for two nodes; the body may take at most LONG_S."""
    opened = Open(folder, free_port())
    try:
        async with wire.deadline(LONG_S):
            yield opened
    finally:
        await opened.close()


async def test_an_agent_that_knows_the_secret_is_heard(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        agent = await Agent.proven(opened.port, opened.secret)
        agent.say(AgentHello(1, (1,)), Died(1, 3, 0.0, BoardRecord(1)))
        verdict = await agent.hears()
        assert isinstance(verdict, Verdict)
        assert (verdict.outcome, verdict.exit_code) == ("nothing", 3)
        await agent.close()


async def test_a_wait_for_an_agent_ends_when_it_connects(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        members = opened.controller_host.controller.membership
        comes = asyncio.ensure_future(opened.controller_host.until(lambda: 1 in members.agents, LONG_S))
        goes = asyncio.ensure_future(opened.controller_host.until(lambda: 1 in members.lost, LONG_S))
        agent = await Agent.proven(opened.port, opened.secret)
        agent.say(AgentHello(1, (1,)))
        await comes
        assert not goes.done()
        await opened.controller_host.until(lambda: 1 in members.lost, 0.0)  # in vain
        assert 1 not in members.lost
        await agent.close()
        await goes


async def test_an_agent_that_does_not_begin_with_a_hello_is_shut_out(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        agent = await Agent.proven(opened.port, opened.secret)
        agent.say(Raised(1, "boom", 1))
        assert await agent.is_shut_out()
        assert opened.controller_host.controller.verdict is None
        await agent.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (AgentHello(0, (1,)), None),
        (AgentHello(2, (1,)), None),
        (AgentHello(1, (0, 1)), None),
        (AgentHello(1, (1, 2)), None),
        (AgentHello(1, (1,)), Died(0, -9, 0.0, BoardRecord(0))),
        (AgentHello(1, (1,)), Raised(7, "boom", 1)),
        (AgentHello(1, (1,)), AgentTerminationRequested(0, "SIGTERM")),
        (AgentHello(1, (1,)), AgentHello(1, (1,))),
    ],
    ids=["the controller", "no node", "its rank", "no rank", "of another", "of nobody", "its end", "twice"],
)
async def test_an_agent_speaks_for_itself_alone(first: AgentHello, second: Any, tmp_path: Path) -> None:
    """Whoever knows the secret and is confused changes nothing for the others."""
    async with host_of_two_nodes(tmp_path) as opened:
        heard: Arrivals[ControllerToAgent] = Arrivals()
        opened.controller_host.receive(0, AgentHello(0, (0,)), heard.extend)
        confused = await Agent.proven(opened.port, opened.secret)
        confused.say(first)
        if second is None:
            assert await confused.is_shut_out()
            assert opened.controller_host.controller.membership.node_of == {0: 0}
            agent = await Agent.proven(opened.port, opened.secret)
            agent.say(AgentHello(1, (1,)))
        else:
            confused.say(second)
            agent = confused
        received = Calls(opened.controller_host, "receive")
        agent.say(Raised(1, "the only one", 1))
        await received.until(lambda: opened.controller_host.controller.incident is not None)
        assert list(opened.controller_host.controller._failures.raised) == [1]
        assert not opened.controller_host.controller.membership.dead
        assert heard == []
        assert sum(opened.controller_host._rejected.counted.values()) == 1
        await confused.close()
        await agent.close()


async def test_a_second_agent_of_a_node_does_not_take_the_place_of_the_first(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        agent, double = (
            await Agent.proven(opened.port, opened.secret),
            await Agent.proven(opened.port, opened.secret),
        )
        received = Calls(opened.controller_host, "receive")
        agent.say(AgentHello(1, (1,)))
        await received.until(lambda: bool(received.counted))
        double.say(AgentHello(1, (1,)))
        assert await double.is_shut_out()
        agent.say(Died(1, 3, 0.0, BoardRecord(1)))
        verdict = await agent.hears()
        assert isinstance(verdict, Verdict)
        assert verdict.line.startswith("rank 1 exited with code 3; ")
        await agent.close()
        await double.close()


async def test_a_message_that_does_not_come_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that stalls in the middle of a message is lost; an idle agent is not."""
    monkeypatch.setattr(wire, "SLOW_S", 0.05)
    async with host_of_two_nodes(tmp_path) as opened:
        heard: Arrivals[ControllerToAgent] = Arrivals()
        opened.controller_host.receive(0, AgentHello(0, (0,)), heard.extend)
        agent = await Agent.proven(opened.port, opened.secret)
        received = Calls(opened.controller_host, "receive")
        agent.say(AgentHello(1, (1,)))
        await received.until(lambda: bool(received.counted))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(agent.is_dropped(), 4 * wire.SLOW_S)
        agent.writer.write(wire.frame(Raised(1, "boom", 1))[:-1])
        await agent.is_dropped()
        await heard.changes.until(lambda: any(isinstance(order, Verdict) for order in heard))
        (verdict,) = [order for order in heard if isinstance(order, Verdict)]
        assert "node 1 is lost" in verdict.line
        await agent.close()


@pytest.mark.parametrize("end", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"])
async def test_an_agent_that_ends_or_talks_nonsense_is_lost(end: bytes, tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        heard: Arrivals[ControllerToAgent] = Arrivals()
        opened.controller_host.receive(0, AgentHello(0, (0,)), heard.extend)
        agent = await Agent.proven(opened.port, opened.secret)
        agent.say(AgentHello(1, (1,)))
        agent.writer.write(end)
        if not end:
            await agent.close()
        await heard.changes.until(lambda: bool(heard))
        (verdict,) = [order for order in heard if isinstance(order, Verdict)]
        assert "node 1 is lost" in verdict.line
        await agent.close()


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        second_host = Open(tmp_path, opened.port)
        assert second_host.port > opened.port
        assert second_host.secret != opened.secret
        await second_host.close()


async def test_no_port_is_left(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        second_host = Open(tmp_path, 65535)
        assert second_host.port == 65535
        listener = AgentListener(b"", None, second_host.rejected, opened.controller_host.serve, read_hello)
        with pytest.raises(OSError, match="no free port from 65535 on"):
            listener.listen("127.0.0.1", 65535)
        await second_host.close()


async def test_a_closed_hub_leaves_no_port(tmp_path: Path) -> None:
    async with host_of_two_nodes(tmp_path) as opened:
        store = opened.controller_host.store.host
        assert store in Path("/proc/net/unix").read_text()
        agent = await Agent.proven(opened.port, opened.secret)
        agent.say(AgentHello(1, (1,)))
        await agent.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", opened.port), LONG_S)
    assert store not in Path("/proc/net/unix").read_text()
