"""Agents of one machine, and another user of the machine with access to torch's rendezvous store."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest
import torch.distributed as dist

from adaptor.errors import StartError
from adaptor.launchers.control import agent_connections, credentials
from adaptor.launchers.control.agent_connections import (
    AgentListener,
    RejectedConnections,
    connect,
    read_hello,
    try_connect,
)
from adaptor.launchers.control.credentials import PLAIN, TLS, UNIX, Invitation
from adaptor.protocol.messages import AgentHello
from adaptor.protocol.wire import deadline
from tests import waiting
from tests.unit.nodes import Job, job
from tests.unit.other_user import other_user, said_by_other_user
from tests.unit.test_controller_host import FIRST, client_of, of_both
from tests.unit.threads import LONG_S

__all__ = ["job"]

# Whatever it says is the hello of an agent that knows everything; what it hears is printed.
INTRUDE = """
connection = socket.socket(socket.AF_UNIX)
connection.connect("\\0" + sys.argv[1])
try:
    connection.sendall(bytes.fromhex(sys.argv[2]))
    print(len(connection.recv(1000)))
except OSError:
    print(0)
"""
LISTEN = """
listener = socket.socket(socket.AF_UNIX)
listener.bind("\\0" + sys.argv[1])
listener.listen()
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    print(len(connection.recv(1000)))
"""


@pytest.fixture
def two_here(job: Job) -> tuple[Job, Any]:
    """Yield a job of two agents on this machine, and its rendezvous store."""
    store = dist.HashStore()
    nodes = [job.node() for _ in range(2)]
    for number, node in enumerate(nodes):
        node.begin([number], number, 2, 2, store, "127.0.0.1")
    return job, store


@pytest.mark.robustness(
    "C1",
    "another user of the machine reads the rendezvous store and comes as an agent",
    "it is shut out at once",
)
def test_another_user_comes_to_the_gate(two_here: tuple[Job, Any]) -> None:
    job, store = two_here
    invitation = Invitation.decode(store.get(credentials.KEY), UNIX)
    assert invitation.port == 0
    standby = client_of(job.nodes[1]).listener.endpoint
    assert standby is not None
    for name in (invitation.name, standby.address):
        assert said_by_other_user(INTRUDE, name, secrets.token_bytes(200).hex()) == "0\n"
    for node in job.nodes:
        counted = client_of(node)._rejected.counted
        waiting.until(lambda counted=counted: counted["were of another user"] == 1, "it was counted")  # type: ignore[misc]


@pytest.mark.robustness(
    "C1",
    "another user puts its own socket into the rendezvous store",
    "an agent tells it nothing, and says so",
)
def test_another_user_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_connections, "CONNECT_TIMEOUT_S", 1.0)
    name = f"ttp-test-{secrets.token_hex(8)}"
    with other_user(LISTEN, name) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "listens\n"
        with pytest.raises(
            StartError, match=f"the socket {name} of this machine .*: another user listens there"
        ):
            asyncio.run(connect(name, 0, b"secret", None))
        assert child.stdout.readline() == "0\n"
        assert asyncio.run(try_connect(name, 0, b"secret", None)) is None


def test_agents_of_one_machine_save_together(job: Job) -> None:
    """Nothing of them listens on a network."""
    job.begin(2, [job.node(), job.node()])
    job.train("step")
    job.workers[1].process.kill()
    assert of_both(job) == [("saved", FIRST, 137)]


def test_nobody_listens_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_connections, "CONNECT_TIMEOUT_S", 1.0)
    with pytest.raises(StartError, match=r"the socket ttp-none of this machine cannot be reached: .*refused"):
        asyncio.run(connect("ttp-none", 0, b"secret", None))


async def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel queues so many, and asyncio would take the error for a connection."""
    monkeypatch.setattr(agent_connections, "BACKLOG", 0)
    monkeypatch.setattr(agent_connections, "PAUSE_S", 0.01)
    came: list[AgentHello] = []

    async def welcome(hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(hello)

    async with deadline(LONG_S):
        rejected = RejectedConnections("the gate")
        listener = AgentListener(b"secret", None, rejected, welcome, read_hello)
        name = listener.open(UNIX, "", 0).address
        connections = await asyncio.gather(*(try_connect(name, 0, b"secret", None) for _ in range(20)))
        assert None not in connections
        for connection in connections:
            assert connection is not None
            connection[1].close()
        await listener.close()
        rejected.close()


@pytest.mark.parametrize("kind", [UNIX, TLS, PLAIN])
def test_the_secret_is_in_the_store_only_where_the_network_is_trusted(kind: str) -> None:
    drawn = Invitation.draw(kind, restart=True, job="pretrain-7")._replace(port=8000 if kind != UNIX else 0)
    if kind == UNIX:
        drawn = drawn._replace(name="ttp-0123456789abcdef")
    assert Invitation.decode(drawn.encode(), kind) == drawn
    assert drawn.secret != drawn._replace(generation="0" * 16).secret, "the generation is proved"
    assert drawn.secret != drawn._replace(restart=False).secret, "so is the restart"
    assert drawn.secret != drawn._replace(job="another").secret, "and the folder of the job"
    assert (drawn.name.encode() in drawn.secret.split()) == (kind == PLAIN)


@pytest.mark.parametrize("settings", [UNIX, TLS])
@pytest.mark.parametrize("kind_in_store", [UNIX, TLS, PLAIN])
def test_the_store_cannot_weaken_the_connection(settings: str, kind_in_store: str) -> None:
    """The content of the store does not weaken the connection that this node's settings require."""
    encoded = Invitation.draw(kind_in_store, restart=False, job="pretrain-7").encode()
    if kind_in_store == settings:
        assert Invitation.decode(encoded, settings).kind == settings
        return
    with pytest.raises(StartError, match=r"^node 0 waits for agents by .* must mean the same on every node$"):
        Invitation.decode(encoded, settings)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        b"unix ../../../../tmp 0 0 name",
        b"unix 0123456789abcdef 2 0 name job",
        b"unix 0123456789abcdef 1 0 name ../job",
        b"x" * 10_000_000,
    ],
    ids=["nothing", "noise", "a path", "a number", "another folder", "too long"],
)
def test_somebody_else_has_written_to_the_store(content: bytes) -> None:
    with pytest.raises(
        StartError, match=r"^what the rendezvous store says of the controller was not written"
    ):
        Invitation.decode(content, UNIX)
