"""The gate of the controller, with strangers before it: over loopback TCP, plain and with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import resource
import secrets
import shutil
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from adaptor import config
from adaptor.controller import failover
from adaptor.errors import StartError
from adaptor.launchers.control import agent_connections, credentials
from adaptor.launchers.control import agent_connections as rejected_module
from adaptor.launchers.control.agent_connections import AgentListener, connect, read_hello, try_connect
from adaptor.launchers.control.credentials import Contexts, Tls
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.agents import Agent
from tests.unit.arrivals import Arrivals, Changes, Rejected
from tests.unit.threads import LONG_S

SECRET = secrets.token_bytes(32)
# All of it is spent by who is silent; what the others do takes some milliseconds, and has to be done by then.
IN_VAIN_S = 4.0
HELLO = AgentHello(1, (1,))


class Open:
    """An open listener, the counts of rejected connections, and the agents that were accepted."""

    def __init__(self, certificates: Tls | None) -> None:
        self.rejected = Rejected("the gate")
        self.listener = AgentListener(SECRET, certificates, self.rejected, self._welcome, read_hello)
        self.port = self.listener.listen("127.0.0.1", free_port())
        self.came: list[AgentHello] = []

    async def _welcome(
        self, hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.came.append(hello)
        writer.write(b"welcome")
        await reader.read()

    async def passes(self, certificates: Tls | None = None) -> None:
        """An agent comes through, whatever else is before the gate."""
        reader, writer = await connect("127.0.0.1", self.port, SECRET, certificates)
        writer.write(wire.frame(HELLO))
        assert await reader.readexactly(7) == b"welcome"
        writer.close()

    async def counts(self, **expected: int) -> None:
        """Wait until so many connections were rejected for the reasons that begin with the names."""
        for name, number in expected.items():
            reason = name.replace("_", " ")
            await self.rejected.changes.until(lambda: self._counted(reason) >= number)  # noqa: B023
            assert self._counted(reason) == number

    def _counted(self, prefix: str) -> int:
        return sum(number for reason, number in self.rejected.counted.items() if reason.startswith(prefix))


@asynccontextmanager
async def gate(certificates: Tls | None = None, limit_s: float = LONG_S) -> AsyncIterator[Open]:
    """Yield an open listener, closed at the end; the body may take at most `limit_s`."""
    opened = Open(certificates)
    try:
        async with wire.deadline(limit_s):
            yield opened
    finally:
        await opened.listener.close()
        opened.rejected.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def own_tls(authority: Authority) -> Tls:
    certificates = credentials.load(config.load(authority.settings()))
    assert certificates is not None
    return certificates


@pytest.fixture(scope="module")
def foreign_tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    """With the same names in them, of another signer."""
    certificates = credentials.load(
        config.load(Authority(tmp_path_factory.mktemp("certificates") / "theirs").settings())
    )
    assert certificates is not None
    return certificates


async def connects_in_vain(
    port: int, secret: bytes, certificates: Tls | None, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Connect to a port that answers at once and wrongly; return the message of the StartError.

    The time limit grows while this process was too slow to receive the first answer.
    """
    for limit_s in (0.5, 5.0, LONG_S):
        monkeypatch.setattr(agent_connections, "CONNECT_TIMEOUT_S", limit_s)
        with pytest.raises(StartError) as raised:
            await connect("127.0.0.1", port, secret, certificates)
        if "it does not answer" not in str(raised.value):
            break
    return str(raised.value)


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


@asynccontextmanager
async def somebody_else(answer: Answer) -> AsyncIterator[int]:
    """Listen at a port; all connections have ended before the event loop ends."""
    writers: set[asyncio.StreamWriter] = set()
    changes = Changes()

    async def each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        try:
            await answer(reader, writer)
        finally:
            writer.close()
            writers.discard(writer)
            changes.tell()

    port = free_port()
    server = await asyncio.start_server(each, "127.0.0.1", port)
    yield port
    server.close()
    await changes.until(lambda: not writers)


async def test_a_wrong_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent with a wrong secret learns nothing, not even a proof of the controller."""
    async with gate() as opened:
        agent = await Agent.connect(opened.port)
        agent.writer.write(secrets.token_bytes(64))
        assert len(await agent.reader.read(100)) == 32
        assert await agent.is_shut_out()
        message = await connects_in_vain(opened.port, bytes(32), None, monkeypatch)
        assert f"at 127.0.0.1 port {opened.port} cannot be reached: it shuts" in message
        await opened.passes()
        assert opened.came == [HELLO]
        assert opened._counted("did not know the secret") >= 2
        await agent.close()


async def test_a_controller_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else listens where the controller was: an agent tells it nothing, and says so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(secrets.token_bytes(64))
        await reader.read()

    async with somebody_else(answer) as port:
        message = await connects_in_vain(port, SECRET, None, monkeypatch)
        assert "does not know the secret of this job" in message


async def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    message = await connects_in_vain(free_port(), SECRET, None, monkeypatch)
    assert re.search(r"cannot be reached: .*Connect call failed.* --local-addr", message)


@pytest.mark.parametrize("kind", ["nobody", "silent", "stranger", "crowded"])
async def test_the_gate_of_a_node_that_may_be_gone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent goes on to the next node, unless this node was only crowded by other agents."""
    monkeypatch.setattr(agent_connections, "PAUSE_S", 0.01)
    monkeypatch.setattr(agent_connections, "TRY_CONNECT_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(agent_connections, "PROOF_S", IN_VAIN_S if kind == "silent" else LONG_S)
    came: Arrivals[int] = Arrivals()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(1)
        if kind == "stranger":
            writer.write(secrets.token_bytes(64))
        elif len(came) == 3:
            await wire.prove_controller(reader, writer, SECRET)
        if kind != "crowded":
            await reader.read()

    if kind == "nobody":
        assert await try_connect("127.0.0.1", free_port(), SECRET, None) is None
        return
    expected = 3 if kind == "crowded" else 1
    async with somebody_else(answer) as port:
        connection = await try_connect("127.0.0.1", port, SECRET, None)
        assert (connection is not None) == (kind == "crowded")
        # Who falls silent may not even have been accepted.
        await came.changes.until(lambda: len(came) >= expected)
        assert len(came) == expected
        if connection is not None:
            connection[1].close()


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_the_gate_of_a_node_that_is_busy(with_tls: bool, request: pytest.FixtureRequest) -> None:
    """The kernel accepts the connection; the busy process answers only after the time limit for a dead
    machine.
    """
    certificates = request.getfixturevalue("own_tls") if with_tls else None

    async def welcome(hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async with wire.deadline(LONG_S):
        loop = asyncio.get_running_loop()
        clock, queued = [loop.time()], asyncio.Event()
        loop.time = lambda: clock[0]  # type: ignore[method-assign]  # nothing is too late but by this test
        listeners = agent_connections.bind("127.0.0.1", 0)
        coming = asyncio.ensure_future(
            try_connect("127.0.0.1", listeners[0].getsockname()[1], SECRET, certificates)
        )
        loop.add_reader(listeners[0], queued.set)
        await queued.wait()
        loop.remove_reader(listeners[0])
        for _ in range(10):  # the agent sees that the kernel has taken it
            await asyncio.sleep(0)
        clock[0] += failover.TRY_CONNECT_TIMEOUT_S + 0.5
        for _ in range(10):  # what is too late ends
            await asyncio.sleep(0)
        rejected = Rejected("the gate")
        listener = AgentListener(SECRET, certificates, rejected, welcome, read_hello)
        listener.serve(listeners)
        connection = await coming
        assert connection is not None
        connection[1].close()
        await listener.close()
        rejected.close()


async def test_a_mirror_does_not_pass() -> None:
    """Giving the controller's own bytes back proves nothing: the two roles sign differently."""
    async with gate() as opened:
        mirror = await Agent.connect(opened.port)
        nonce = await mirror.reader.readexactly(32)
        mirror.writer.write(nonce + nonce + wire.frame(HELLO))
        assert await mirror.is_shut_out()
        await opened.counts(did_not_know=1)
        assert opened.came == []
        await mirror.close()


async def test_a_replay_does_not_pass() -> None:
    """All that an agent sent, recorded and sent again."""
    async with gate() as opened:
        recorded = bytearray()
        agent = await Agent.connect(opened.port)
        write = agent.writer.write
        agent.writer.write = lambda data: (recorded.extend(data), write(data))[1]  # type: ignore[method-assign]
        await agent.prove(SECRET.hex())
        agent.say(HELLO)
        assert await agent.reader.readexactly(7) == b"welcome"
        replay = await Agent.connect(opened.port)
        replay.writer.write(bytes(recorded))
        await replay.reader.readexactly(32)
        assert await replay.is_shut_out()
        await opened.counts(did_not_know=1)
        assert opened.came == [HELLO]
        await agent.close()
        await replay.close()


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("noise", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 20], ids=len)
async def test_noise(noise: bytes, with_tls: bool, request: pytest.FixtureRequest) -> None:
    certificates = request.getfixturevalue("own_tls") if with_tls else None
    async with gate(certificates) as opened:
        stranger = await Agent.connect(opened.port)
        stranger.writer.write(noise)
        stranger.writer.write_eof()
        await stranger.close()
        await opened.passes(certificates)
        await opened.rejected.changes.until(lambda: bool(opened.rejected.counted))
        assert sum(opened.rejected.counted.values()) == 1


async def test_a_port_scan(many_descriptors: int) -> None:
    """Connections that end at once, half of them by a reset: each is counted and leaves no state behind."""
    async with gate() as opened:
        reset = struct.pack("ii", 1, 0)
        for number in range(1000):
            with socket.socket() as stranger:
                stranger.setblocking(False)
                await asyncio.get_running_loop().sock_connect(stranger, ("127.0.0.1", opened.port))
                if number % 2:
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
        await opened.passes()
        await opened.rejected.changes.until(lambda: sum(opened.rejected.counted.values()) >= 1000)
        assert sum(opened.rejected.counted.values()) == 1000
        assert not opened.listener._unproved
        assert opened.came == [HELLO]


async def test_a_slow_stranger_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent client, a slow client and a client with the secret but no hello share a single time limit."""
    monkeypatch.setattr(agent_connections, "HANDSHAKE_S", IN_VAIN_S)
    async with gate() as opened:
        silent, slow, proved = [await Agent.connect(opened.port) for _ in range(3)]
        await proved.prove(SECRET.hex())

        async def trickle() -> None:
            while True:
                slow.writer.write(b"x")
                await asyncio.sleep(IN_VAIN_S / 20)  # a proof has three times as many bytes

        task = asyncio.ensure_future(trickle())
        for agent in (silent, slow):
            await agent.reader.readexactly(32)
        for agent in (silent, slow, proved):
            assert await agent.is_shut_out()
            await agent.close()
        task.cancel()
        await opened.counts(had_not_proved=3)


async def test_a_slow_stranger_in_a_tls_handshake_is_dropped(
    own_tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent, or a byte of its first message at a time."""
    monkeypatch.setattr(agent_connections, "HANDSHAKE_S", IN_VAIN_S)
    memory_bio = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        own_tls.contexts.client.wrap_bio(ssl.MemoryBIO(), memory_bio).do_handshake()
    async with gate(own_tls) as opened:
        silent, slow = [await Agent.connect(opened.port) for _ in range(2)]

        async def trickle() -> None:
            for byte in memory_bio.read():
                slow.writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        task = asyncio.ensure_future(trickle())
        for agent in (silent, slow):
            assert await agent.is_shut_out()
            await agent.close()
        task.cancel()
        await opened.counts(had_not_proved=2)
        assert opened.came == []


@pytest.fixture
def many_descriptors() -> Iterator[int]:
    """Allow more descriptors; yield how many connections this process may make to itself, at most 3000."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 10_000 if hard == resource.RLIM_INFINITY else min(hard, 10_000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))
    yield min(3000, limit - 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
async def test_thousands_of_half_open_connections(
    with_tls: bool, many_descriptors: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = request.getfixturevalue("own_tls") if with_tls else None
    limit_s = 4 * LONG_S  # some seconds of computing, of which a loaded machine makes a minute
    monkeypatch.setattr(agent_connections, "HANDSHAKE_S", limit_s)  # nobody is dropped for being slow

    async def come(opened: Open, silent: contextlib.ExitStack) -> None:
        for _ in range(many_descriptors):
            stranger = silent.enter_context(socket.socket())
            stranger.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stranger, ("127.0.0.1", opened.port))
        await opened.passes(certificates)
        await opened.counts(were_closed_for_newer_ones=many_descriptors + 1 - opened.listener._most)
        assert len(opened.listener._unproved) == opened.listener._most - 1
        await opened.passes(certificates)
        silent.close()
        await opened.counts(went_without=opened.listener._most - 1)
        assert opened.came == [HELLO, HELLO]

    async with gate(certificates, limit_s) as opened:
        with contextlib.ExitStack() as silent:
            await come(opened, silent)


async def test_no_descriptors_are_left() -> None:
    """Connections of strangers free their descriptors; an agent retries until it gets a descriptor."""
    async with gate() as opened:
        silent = [await Agent.connect(opened.port) for _ in range(5)]
        for stranger in silent:
            assert await stranger.reader.readexactly(32), "it was accepted"
        late = socket.socket()
        late.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, hard))
        try:
            await asyncio.get_running_loop().sock_connect(late, ("127.0.0.1", opened.port))
            await opened.counts(were_closed_for_newer_ones=5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await opened.passes()
        for stranger in silent:
            assert await stranger.is_shut_out()
            await stranger.close()
        late.close()


class Lines(logging.Handler):
    """Collects the lines of a logger; pytest's own handler may receive them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: Arrivals[str] = Arrivals()

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


async def test_one_line_for_all_strangers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Lines()
    monkeypatch.setattr(logging.getLogger("adaptor"), "handlers", [log])
    monkeypatch.setattr(rejected_module, "LINE_S", 0.5)
    start = time.monotonic()
    with caplog.at_level(logging.INFO, "adaptor"):
        async with gate() as opened:
            for _ in range(100):
                stranger = await Agent.connect(opened.port)
                stranger.writer.write(bytes(64))
                await stranger.close()
            await opened.counts(did_not_know=100)
            await log.heard.changes.until(lambda: bool(log.heard))
            last = await Agent.connect(opened.port)
            await last.close()
            await opened.counts(went_without=1)
    took = time.monotonic() - start
    assert log.heard[-1] == (
        "101 rejected connections at the gate so far: 100 did not know the secret, 1 went without a proof"
    )
    assert len(log.heard) <= took / rejected_module.LINE_S + 1, "each after its time, and one in the end"
    assert not any(SECRET.hex() in line for line in log.heard)


# TLS


async def test_an_agent_with_a_certificate(own_tls: Tls) -> None:
    async with gate(own_tls) as opened:
        await opened.passes(own_tls)
        assert not opened.rejected.counted


async def test_only_tls_13_is_spoken(authority: Authority, own_tls: Tls) -> None:
    """Whoever has a certificate and can speak no newer one than 1.2 is refused, on either side."""
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.check_hostname = False
    older.load_verify_locations(authority.settings()["TTP_TLS_CA"])
    older.load_cert_chain(authority.settings()["TTP_TLS_CERT"], authority.settings()["TTP_TLS_KEY"])
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    current = own_tls.contexts
    assert current.client.minimum_version == current.server.minimum_version == ssl.TLSVersion.TLSv1_3
    async with gate(own_tls) as opened:
        agent = await Agent.connect(opened.port, current.client)
        assert agent.writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        await agent.close()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await Agent.connect(opened.port, older)
        await opened.counts(had_no_certificate=1)
        assert opened.came == []


async def test_a_certificate_of_another_signer(own_tls: Tls, foreign_tls: Tls) -> None:
    """Each side refuses the other's, whatever the secret; the agent says why, at once."""
    async with gate(own_tls) as opened:
        with pytest.raises(StartError, match="cannot be reached: certificate"):
            await connect("127.0.0.1", opened.port, SECRET, foreign_tls)
        await opened.passes(own_tls)
        assert opened.came == [HELLO]


class Fixed(Tls):
    """Certificates that are in no file."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self.contexts = Contexts(context, context)

    async def newest(self) -> Contexts:
        return self.contexts


async def test_the_controller_refuses_a_certificate_of_another_signer(
    authority: Authority, foreign_tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that accept any controller certificate: without a certificate and with one."""
    async with gate(foreign_tls) as opened:
        credulous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        credulous.check_hostname = False
        credulous.verify_mode = ssl.CERT_NONE
        for loaded in (False, True):
            if loaded:
                files = authority.settings("stranger")
                credulous.load_cert_chain(files["TTP_TLS_CERT"], files["TTP_TLS_KEY"])
            message = await connects_in_vain(opened.port, SECRET, Fixed(credulous), monkeypatch)
            assert "TTP_TLS_CA must mean the same on every node" in message
        assert opened._counted("had no certificate of this job") >= 2
        assert opened.came == []


@pytest.mark.robustness(
    "B4", "every certificate of the job is replaced while it trains", "those made later are used from then on"
)
async def test_renewed_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that connect later use the renewed certificates, even of another signer; others stay."""
    monkeypatch.setattr(credentials, "READ_S", LONG_S)
    signers = [Authority(tmp_path / name) for name in ("old", "new")]
    ends = "CERT", "KEY", "CA"
    files = {f"TTP_TLS_{end}": str(tmp_path / end) for end in ends}

    signed = [signer.settings() for signer in signers]
    for end in ends:
        shutil.copy(signed[0][f"TTP_TLS_{end}"], files[f"TTP_TLS_{end}"])
    controller_tls = credentials.load(config.load(files))
    old, new = (credentials.load(config.load(settings)) for settings in signed)
    async with gate(controller_tls) as opened:
        connection = await connect("127.0.0.1", opened.port, SECRET, old)
        for end in ends:
            shutil.copy(signed[1][f"TTP_TLS_{end}"], files[f"TTP_TLS_{end}"])
        await opened.passes(new)
        await opened.passes(controller_tls)
        with pytest.raises(StartError, match="cannot be reached: certificate"):
            await connect("127.0.0.1", opened.port, SECRET, old)
        connection[1].write(wire.frame(HELLO))
        assert await connection[0].readexactly(7) == b"welcome"
        connection[1].close()


async def test_the_secret_is_asked_for_inside_of_tls(own_tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate(own_tls) as opened:
        message = await connects_in_vain(opened.port, bytes(32), own_tls, monkeypatch)
        assert "it shuts the connection" in message
        assert opened.came == []


async def test_one_side_speaks_tls(own_tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gate() as opened:
        message = await connects_in_vain(opened.port, SECRET, own_tls, monkeypatch)
        assert "cannot be reached: TLS: " in message
    async with gate(own_tls) as opened:  # both sides wait for the other to begin
        monkeypatch.setattr(agent_connections, "CONNECT_TIMEOUT_S", 0.5)
        with pytest.raises(StartError, match="TTP_TLS and TTP_TLS_CA must mean the same on every node"):
            await connect("127.0.0.1", opened.port, SECRET, None)
