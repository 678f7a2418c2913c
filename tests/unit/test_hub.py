"""Agents of several nodes and the controller: over loopback TCP, with strangers in between."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from adaptor.control import wire
from adaptor.control.messages import (
    AgentHello,
    BoardRecord,
    ControllerToAgent,
    Died,
    Leave,
    Raised,
    Verdict,
)
from adaptor.control.processor import EXIT_SURVIVOR
from adaptor.errors import StartError
from adaptor.launchers import node as node_module
from adaptor.launchers.chronicle import Chronicle
from adaptor.launchers.hub import Hub
from tests.certificates import Authority
from tests.unit.agents import Agent, free_port
from tests.unit.nodes import Job, job
from tests.unit.threads import LONG_S

__all__ = ["job"]

FIRST = 11


@pytest.fixture
def two_nodes(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Two nodes with one worker each; what waits for word of the other node waits for ever."""
    monkeypatch.setattr(node_module, "FAREWELL_S", 10 * LONG_S)
    port = str(free_port())
    job.begin(2, [job.node(TTP_PORT=port), job.node(TTP_PORT=port)])
    return job


def addresses_of(port: int) -> list[str]:
    """Where somebody listens at this port, as the kernel writes it."""
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        if (table := Path("/proc/net", name)).exists()
        for line in table.read_text().splitlines()[1:]
    ]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]


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
    monkeypatch.setattr(node_module, "FAREWELL_S", 10 * LONG_S)
    signer, port = Authority(tmp_path / "signer"), str(free_port())
    nodes = [job.node(TTP_PORT=port, **signer.settings(f"node{number}")) for number in (0, 1)]
    for victim, steps in ((1, 1), (0, 2)):
        job.begin(2, nodes)
        job.train(*["step"] * steps)
        job.workers[victim].process.kill()
        assert of_both(job) == [("saved", FIRST + steps - 1, 137)]
        job.end()


def test_a_node_with_a_certificate_of_another_signer(job: Job, tmp_path: Path) -> None:
    """It says so at once and does not start its workers."""
    port = str(free_port())
    signers = [Authority(tmp_path / name) for name in ("ours", "theirs")]
    nodes = [job.node(TTP_PORT=port, **signer.settings()) for signer in signers]
    with pytest.raises(StartError, match="cannot be reached: certificate"):
        job.begin(2, nodes)
    assert list(job.workers) == [0]


def test_nothing_of_one_machine_can_be_reached_from_another(two_nodes: Job) -> None:
    """Neither certificates nor `plain`: all that listens does so on loopback."""
    hub = two_nodes.nodes[0]._hub
    assert hub is not None
    for port in (hub._gate._listeners[0].getsockname()[1], hub._store.port):
        assert addresses_of(port) == ["0100007F"]


def test_the_secret_is_seen_nowhere(two_nodes: Job) -> None:
    """Not in the environment of a worker, on a command line or in the log."""
    job = two_nodes
    hub = job.nodes[0]._hub
    assert hub is not None
    secret = hub._secret
    job.train("step")
    worker = Path(f"/proc/{job.workers[0].process.pid}")
    seen = [(worker / name).read_bytes() for name in ("environ", "cmdline")]
    job.workers[1].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]
    logs = [path.read_bytes() for path in job.logs.rglob("*") if path.is_file()]
    assert logs
    assert not any(secret.hex().encode() in text for text in (*seen, *logs))


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


def test_the_loss_of_the_controller_ends_the_others(two_nodes: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "EXIT_GRACE_S", 0.1)
    job = two_nodes
    job.train("step")
    lost = job.nodes.pop(0)
    assert lost._hub is not None
    lost._hub._sends.clear()  # a node that is lost takes no leave
    lost.close()
    verdict = job.verdict()
    assert verdict.outcome == "lost"
    assert verdict.line.startswith("the controller's node is lost")
    assert job.workers[1].status() == -signal.SIGKILL


def test_a_node_that_has_finished_does_not_end_the_others(two_nodes: Job) -> None:
    job = two_nodes
    job.train("step")
    job.nodes.pop(0).close()
    job.workers[1].process.kill()
    verdict = job.verdict()
    assert verdict.outcome == "lost"
    assert verdict.line.startswith("rank 1 ended with status -9 after node 0 had finished")


def test_a_node_that_leaves_in_the_middle_of_an_incident_ends_the_others(two_nodes: Job) -> None:
    """Their workers wait to be asked for their state, and nobody will ask."""
    job = two_nodes
    job.train("step", "step")
    job.workers[1].process.send_signal(signal.SIGSTOP)  # so that the incident cannot be over
    job.nodes[0].leave("SIGTERM", 0.0)
    job.nodes.pop(0).close()
    verdict = job.verdict()
    assert verdict.outcome == "lost"
    assert verdict.line.startswith("the controller's node is lost")


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


def test_strangers_do_not_disturb_a_job(two_nodes: Job) -> None:
    job = two_nodes
    hub = job.nodes[0]._hub
    assert hub is not None
    port = hub._gate._listeners[0].getsockname()[1]
    strangers = [socket.create_connection(("127.0.0.1", port), LONG_S) for _ in range(3)]
    strangers[1].sendall(b"GET / HTTP/1.1\r\n\r\n" + secrets.token_bytes(100))
    strangers[2].close()
    job.train("step")
    assert job.nodes[0].verdict is None
    job.workers[0].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]
    for stranger in strangers:
        stranger.close()


# the hub alone


def with_hub(act: Callable[[Hub, int, str], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    """Run `act(hub, port, secret)` beside a hub for two nodes."""

    async def main() -> None:
        hub = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        hub.start()
        try:
            await asyncio.wait_for(act(hub, *hub.listen(free_port())), LONG_S)
        finally:
            await hub.close()

    asyncio.run(main())


def test_an_agent_that_knows_the_secret_is_heard(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(AgentHello(1, (1,)), Died(1, 3, 0.0, BoardRecord(1)))
        verdict = await agent.hears()
        assert isinstance(verdict, Verdict)
        assert (verdict.outcome, verdict.exit_code) == ("nothing", 3)
        await agent.close()

    with_hub(act, tmp_path)


def test_who_begins_with_something_else_is_shut_out(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(Raised(1, "boom", 1))
        assert await agent.is_shut_out()
        assert hub.controller.verdict is None
        await agent.close()

    with_hub(act, tmp_path)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (AgentHello(0, (1,)), None),
        (AgentHello(2, (1,)), None),
        (AgentHello(1, (0, 1)), None),
        (AgentHello(1, (1, 2)), None),
        (AgentHello(1, (1,)), Died(0, -9, 0.0, BoardRecord(0))),
        (AgentHello(1, (1,)), Raised(7, "boom", 1)),
        (AgentHello(1, (1,)), Leave(0, "SIGTERM")),
        (AgentHello(1, (1,)), AgentHello(1, (1,))),
    ],
    ids=["the controller", "no node", "its rank", "no rank", "of another", "of nobody", "its end", "twice"],
)
def test_an_agent_speaks_for_itself_alone(first: AgentHello, then: Any, tmp_path: Path) -> None:
    """Whoever knows the secret and is confused changes nothing for the others."""

    async def act(hub: Hub, port: int, secret: str) -> None:
        heard: list[ControllerToAgent] = []
        hub.take(0, AgentHello(0, (0,)), heard.append)
        confused = await Agent.connect(port)
        await confused.prove(secret)
        confused.say(first)
        if then is None:
            assert await confused.is_shut_out()
            assert hub.controller._node_of == {0: 0}
            agent = await Agent.connect(port)
            await agent.prove(secret)
            agent.say(AgentHello(1, (1,)))
        else:
            confused.say(then)
            agent = confused
        agent.say(Raised(1, "the only one", 1))
        while hub.controller.incident is None:
            await asyncio.sleep(0.001)
        assert list(hub.controller._causes.raised) == [1]
        assert not hub.controller._dead
        assert heard == []
        assert sum(hub._strangers.counted.values()) == 1
        await confused.close()
        await agent.close()

    with_hub(act, tmp_path)


def test_a_second_agent_of_a_node_does_not_take_the_place_of_the_first(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        agent, double = await Agent.connect(port), await Agent.connect(port)
        for each in (agent, double):
            await each.prove(secret)
        agent.say(AgentHello(1, (1,)))
        while 1 not in hub._sends:
            await asyncio.sleep(0.001)
        double.say(AgentHello(1, (1,)))
        assert await double.is_shut_out()
        agent.say(Died(1, 3, 0.0, BoardRecord(1)))
        verdict = await agent.hears()
        assert isinstance(verdict, Verdict)
        assert verdict.line.startswith("rank 1 exited with code 3; ")
        await agent.close()
        await double.close()

    with_hub(act, tmp_path)


def test_a_message_that_does_not_come_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is in the middle of a message for too long is lost; one that says nothing is not."""
    monkeypatch.setattr(wire, "SLOW_S", 0.05)

    async def act(hub: Hub, port: int, secret: str) -> None:
        heard: list[ControllerToAgent] = []
        hub.take(0, AgentHello(0, (0,)), heard.append)
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(AgentHello(1, (1,)))
        await asyncio.sleep(0.2)
        assert 1 in hub._sends
        agent.writer.write(wire.frame(Raised(1, "boom", 1))[:-1])
        assert await agent.is_shut_out()
        (verdict,) = [order for order in heard if isinstance(order, Verdict)]
        assert "node 1 is lost" in verdict.line
        await agent.close()

    with_hub(act, tmp_path)


@pytest.mark.parametrize("end", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"])
def test_an_agent_that_ends_or_talks_nonsense_is_lost(end: bytes, tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        heard: list[ControllerToAgent] = []
        hub.take(0, AgentHello(0, (0,)), heard.append)
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(AgentHello(1, (1,)))
        agent.writer.write(end)
        if not end:
            await agent.close()
        while not heard:
            await asyncio.sleep(0.001)
        (verdict,) = [order for order in heard if isinstance(order, Verdict)]
        assert "node 1 is lost" in verdict.line
        await agent.close()

    with_hub(act, tmp_path)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        other = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        taken, other_secret = other.listen(port)
        assert taken > port
        assert other_secret != secret
        await other.close()

    with_hub(act, tmp_path)


def test_no_port_is_left(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        other = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        first, _ = other.listen(65535)
        assert first == 65535
        third = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        with pytest.raises(OSError, match="no free port from 65535 on"):
            third.listen(65535)
        await other.close()
        await third.close()

    with_hub(act, tmp_path)


def test_a_closed_hub_leaves_no_port(tmp_path: Path) -> None:
    ports: list[int] = []

    async def act(hub: Hub, port: int, secret: str) -> None:
        ports.extend((port, hub._store.port))
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(AgentHello(1, (1,)))
        await agent.close()

    with_hub(act, tmp_path)
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), LONG_S)
