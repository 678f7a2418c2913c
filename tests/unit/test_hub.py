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
    Raised,
    Verdict,
)
from adaptor.control.processor import EXIT_SURVIVOR
from adaptor.launchers import hub as hub_module
from adaptor.launchers import node as node_module
from adaptor.launchers.chronicle import Chronicle
from adaptor.launchers.hub import Hub, prove
from tests.unit.nodes import Job, job
from tests.unit.threads import LONG_S

__all__ = ["job"]

FIRST = 11


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture
def two_nodes(job: Job, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Two nodes with one worker each; what waits for word of the other node waits for ever."""
    monkeypatch.setattr(node_module, "FAREWELL_S", 10 * LONG_S)
    port = str(free_port())
    job.begin(2, [job.node(TTP_PORT=port), job.node(TTP_PORT=port)])
    return job


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
    assert hub._server is not None
    port = hub._server.sockets[0].getsockname()[1]
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


class Agent:
    """A connection to the hub, as an agent has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> Agent:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def prove(self, secret: str) -> None:
        await prove(self.reader, self.writer, bytes.fromhex(secret), first=True)

    def say(self, *messages: Any) -> None:
        self.writer.write(b"".join(wire.frame(message) for message in messages))

    async def hears(self) -> ControllerToAgent:
        return await wire.read(self.reader, wire.to_agent)

    async def is_shut_out(self) -> bool:
        """Whether the other side ends the connection without a message."""
        try:
            return await self.reader.read() == b""
        except ConnectionResetError:  # it had not read all that was sent to it
            return True

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except OSError:  # the other side was faster
            pass


def with_hub(act: Callable[[Hub, int, str], Coroutine[Any, Any, None]], tmp_path: Path) -> None:
    """Run `act(hub, port, secret)` beside a hub for two nodes."""

    async def main() -> None:
        hub = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        hub.start()
        try:
            await asyncio.wait_for(act(hub, *await hub.listen(free_port())), LONG_S)
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


def test_a_wrong_secret_is_refused_on_both_sides(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        agent = await Agent.connect(port)
        with pytest.raises(ConnectionError, match="does not know the secret"):
            await agent.prove(secrets.token_hex(32))
        agent.say(AgentHello(1, (1,)))
        assert await agent.is_shut_out()
        assert hub.controller._node_of == {}
        await agent.close()

    with_hub(act, tmp_path)


def test_a_mirror_does_not_pass(tmp_path: Path) -> None:
    """Sending the hub's own nonce and answer back proves nothing: the two roles sign differently."""

    async def act(hub: Hub, port: int, secret: str) -> None:
        mirror = await Agent.connect(port)
        mirror.writer.write(await mirror.reader.readexactly(32))
        mirror.writer.write(await mirror.reader.readexactly(32))
        mirror.say(AgentHello(1, (1,)))
        assert await mirror.is_shut_out()
        assert hub.controller._node_of == {}
        await mirror.close()

    with_hub(act, tmp_path)


@pytest.mark.parametrize("noise", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 20], ids=len)
def test_noise_is_ignored(noise: bytes, tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        stranger = await Agent.connect(port)
        stranger.writer.write(noise)
        stranger.writer.write_eof()
        await stranger.close()
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(AgentHello(1, (1,)), Died(1, 3, 0.0, BoardRecord(1)))
        assert isinstance(await agent.hears(), Verdict)
        await agent.close()

    with_hub(act, tmp_path)


def test_half_open_connections_block_nobody(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        silent = [await Agent.connect(port) for _ in range(20)]
        silent[0].writer.write(b"x" * 31)
        proved = await Agent.connect(port)
        await proved.prove(secret)  # and then says nothing
        agent = await Agent.connect(port)
        await agent.prove(secret)
        agent.say(AgentHello(1, (1,)), Died(1, 3, 0.0, BoardRecord(1)))
        assert isinstance(await agent.hears(), Verdict)
        for connection in (agent, proved, *silent):
            await connection.close()

    with_hub(act, tmp_path)


def test_a_silent_connection_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "HANDSHAKE_S", 0.05)

    async def act(hub: Hub, port: int, secret: str) -> None:
        silent, proved = await Agent.connect(port), await Agent.connect(port)
        await proved.prove(secret)
        await silent.reader.readexactly(32)
        assert await silent.is_shut_out()
        assert await proved.is_shut_out()
        for connection in (silent, proved):
            await connection.close()

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


@pytest.mark.parametrize("end", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1\xc1"])
def test_an_agent_that_ends_or_talks_nonsense_is_lost(end: bytes, tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        heard: list[ControllerToAgent] = []
        hub.attach(0, heard.append)
        hub.take(0, AgentHello(0, (0,)))
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
        taken, other_secret = await other.listen(port)
        assert taken > port
        assert other_secret != secret
        await other.close()

    with_hub(act, tmp_path)


def test_a_deadline_of_our_own() -> None:
    """What stands in for asyncio.timeout on 3.10."""

    async def act() -> None:
        async with hub_module._Deadline(LONG_S):
            await asyncio.sleep(0)
        with pytest.raises(asyncio.TimeoutError):
            async with hub_module._Deadline(0.01):
                await asyncio.sleep(LONG_S)
        with pytest.raises(KeyError):
            async with hub_module._Deadline(LONG_S):
                raise KeyError
        await asyncio.sleep(0)  # nothing cancels us later

    asyncio.run(act())


def test_no_port_is_left(tmp_path: Path) -> None:
    async def act(hub: Hub, port: int, secret: str) -> None:
        other = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        first, _ = await other.listen(65535)
        assert first == 65535
        third = Hub(2, 2, 10.0, "127.0.0.1", Chronicle(str(tmp_path)))
        with pytest.raises(OSError, match="no free port from 65535 on"):
            await third.listen(65535)
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
