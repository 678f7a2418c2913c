"""Spare nodes at the gate of node 0: over an abstract socket, loopback TCP and TLS."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore, TCPStore

from adaptor import config
from adaptor.controller.membership import Membership
from adaptor.errors import ConfigError, StartError
from adaptor.launchers.cli import flags, ttprun
from adaptor.launchers.control import agent_connections, credentials
from adaptor.launchers.control.agent_connections import AgentListener, connect
from adaptor.launchers.control.credentials import Invitation
from adaptor.launchers.rendezvous import waiting as rendezvous_waiting
from adaptor.launchers.rendezvous.waiting import GateLostError, PlaceLostError, SilentStoreError, is_abandoned
from adaptor.launchers.spares import places, spare_gate, spare_node
from adaptor.launchers.spares.places import Places
from adaptor.launchers.spares.spare_gate import COMES_S, SpareGate, StartCounts, fill_for_restart
from adaptor.launchers.spares.spare_node import Taken, WarmProcesses, stay_at_gate, wait_at_gate
from adaptor.protocol import wire
from adaptor.protocol.environment import NEWCOMER
from adaptor.protocol.messages import AgentHello, Endpoint
from adaptor.protocol.spare_messages import (
    Gate,
    MemberHello,
    SpareAccepted,
    SpareAsked,
    SpareHello,
    SpareReady,
    SpareReleased,
    TakePlace,
    from_spare_node,
    to_spare_node,
)
from adaptor.protocol.wire import deadline
from tests import waiting
from tests.certificates import Authority
from tests.ports import free_port
from tests.unit.arrivals import Arrivals, Rejected
from tests.unit.nodes import Job, job

__all__ = ["job"]

MINE = SpareHello({"--nnodes": "2", "--save": "/shared/a"}, ("--lr", "0.1"), "node0", 1)
PLACE = TakePlace(1, restarts=2, generations=3, owner="")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let peers answer late on a busy machine: in these tests a silent peer has ended."""
    monkeypatch.setattr(spare_gate, "ANSWER_S", waiting.LONG_S)
    monkeypatch.setattr(agent_connections, "TRY_CONNECT_TIMEOUT_S", waiting.LONG_S)
    monkeypatch.setattr(agent_connections, "PROOF_S", waiting.LONG_S)


def _gate(settings: config.Config) -> SpareGate:
    gate = SpareGate(
        credentials.kind_of(settings), free_port(), credentials.load(settings), MINE, lambda: None
    )
    gate.begin_turn()
    return gate


async def _opened(settings: config.Config) -> tuple[SpareGate, Invitation]:
    """Return an open gate and its invitation."""
    gate = _gate(settings)
    return gate, await gate.open("127.0.0.1")


async def _waits(gate: SpareGate, count: int) -> None:
    await asyncio.to_thread(waiting.until, lambda: gate.waiting == count, f"{count} spares wait")


@pytest.fixture(params=["unix", "plain", "tls"])
def settings(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Config:
    settings_of_kind = {"unix": {}, "plain": {"TTP_TLS": "plain"}}.get(request.param)
    if settings_of_kind is None:
        settings_of_kind = Authority(tmp_path / "signer").settings()
    for name, value in settings_of_kind.items():
        monkeypatch.setenv(name, value)
    return config.load()


def _at(invitation: Invitation) -> Gate:
    return Gate("127.0.0.1", invitation.encode().decode())


async def test_the_places_of_lost_nodes_go_to_spares_that_are_there(settings: config.Config) -> None:
    """Two spares for three lost nodes: the third place stays empty."""
    gate, invitation = await _opened(settings)
    spares = [
        asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
        for _ in range(3)
    ]
    await _waits(gate, 3)
    spares[0].cancel()
    await _waits(gate, 2)
    assert await gate.fill({1: (1,), 2: (2,), 3: (3,)}, StartCounts(restarts=2, generations=3)) == {}
    owners = await gate.fill({1: (1,), 2: (2,)}, StartCounts(restarts=2, generations=3))
    places = {
        taken.place.node: taken for taken in await asyncio.gather(*spares[1:]) if isinstance(taken, Taken)
    }
    assert {node: taken.place for node, taken in places.items()} == {
        node: msgspec.structs.replace(PLACE, node=node, owner=owner) for node, owner in owners.items()
    }
    assert gate.waiting == 0
    # The gate learns that a process with a place has ended, of which nothing but this connection is here.
    assert gate.gone == {}
    places[2].connection.close()
    await asyncio.to_thread(waiting.until, lambda: gate.gone, "the gate knows")
    assert gate.gone == {2: AgentHello(2, (2,), host=MINE.host, pid=MINE.pid)}
    places[1].connection.close()
    await gate.close()


async def test_a_spare_that_goes_while_another_one_is_asked_gets_no_place(settings: config.Config) -> None:
    gate, invitation = await _opened(settings)

    async def answers(goes: bool) -> None:
        """Answer once: at once and go, or when the other one has gone."""
        address = (
            (invitation.name, 0) if invitation.kind == credentials.UNIX else ("127.0.0.1", invitation.port)
        )
        reader, writer = await connect(*address, invitation.secret, credentials.load(settings))
        writer.write(wire.frame(MINE))
        while not isinstance(await wire.read(reader, to_spare_node), SpareAsked):
            pass
        if not goes:
            await _waits(gate, 1)
        writer.write(wire.frame(SpareReady()))
        if not goes:
            await reader.read()
        writer.close()

    first = asyncio.ensure_future(answers(goes=True))
    await _waits(gate, 1)
    second = asyncio.ensure_future(answers(goes=False))
    await _waits(gate, 2)
    assert await gate.fill({1: (1,), 2: (2,)}, StartCounts(restarts=1, generations=1)) == {}
    assert gate.waiting == 1
    await gate.close()
    await asyncio.gather(first, second)


async def test_the_end_of_an_agent_of_the_job_is_noticed_between_two_starts(settings: config.Config) -> None:
    """Between two starts no controller notices it. A place that a spare has taken is not reported."""
    gate, invitation = await _opened(settings)
    certificates = credentials.load(settings)

    async def stays(node: int) -> socket.socket:
        me = MemberHello(node, (node,), f"node{node}", 100 + node)
        connection = await stay_at_gate(invitation, "127.0.0.1", certificates, me)
        assert connection is not None
        return connection

    first, second = await stays(1), await stays(2)
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(gate, 1)
    assert gate.gone == {}
    first.close()
    await asyncio.to_thread(waiting.until, lambda: gate.gone, "the gate knows")
    assert gate.gone == {1: AgentHello(1, (1,), host="node1", pid=101)}
    await gate.fill({2: (2,)}, StartCounts(restarts=1, generations=1))
    taken = await spare
    assert isinstance(taken, Taken)
    second.close()
    taken.connection.close()
    await asyncio.to_thread(waiting.until, lambda: 2 in gate.gone, "the gate knows")
    assert gate.gone[2].pid == MINE.pid
    await gate.close()


async def test_an_agent_that_comes_again_is_not_lost(settings: config.Config) -> None:
    """Only the agent's connection ended, before or after the agent came again; the agent may have been a
    spare node.
    """
    lost: list[int] = []
    gate = SpareGate(
        credentials.kind_of(settings),
        free_port(),
        credentials.load(settings),
        MINE,
        lambda: lost.extend(hello.pid for hello in gate.gone.values()),
    )
    gate.begin_turn()
    invitation = await gate.open("127.0.0.1")

    async def stays(pid: int, owner: str = "") -> socket.socket:
        me = MemberHello(1, (1,), "node1", pid, owner)
        connection = await stay_at_gate(invitation, "127.0.0.1", credentials.load(settings), me)
        assert connection is not None
        return connection

    (await stays(11)).close()
    await asyncio.to_thread(waiting.until, lambda: gate.gone, "the gate knows")
    second = await stays(2)
    assert gate.gone == {}
    third = await stays(3)
    second.close()
    third.close()
    await asyncio.to_thread(waiting.until, lambda: gate.gone, "the gate knows")
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(gate, 1)
    owners = await gate.fill({1: (1,)}, StartCounts(restarts=1, generations=1))
    taken = await spare
    assert isinstance(taken, Taken)
    lost_agent = await stays(4)  # it was taken for lost
    returned_agent = await stays(5, owners[1])
    taken.connection.close()
    lost_agent.close()
    returned_agent.close()
    await asyncio.to_thread(waiting.until, lambda: gate.gone, "the gate knows")
    await gate.close()
    assert lost == [11, 3, 5]


@pytest.mark.parametrize("kind", ["unix", "plain", "tls"])
async def test_a_node_comes_again_to_the_gate_when_its_connection_ends(
    kind: str, job: Job, tmp_path: Path
) -> None:
    """A node that comes a moment after node 0's own would otherwise be lost at the next start of workers."""
    came: Arrivals[MemberHello] = Arrivals()

    async def first(reader: asyncio.StreamReader) -> MemberHello:
        hello = await wire.read(reader, from_spare_node)
        assert isinstance(hello, MemberHello)
        return hello

    async def welcome(hello: MemberHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.frame(SpareAccepted()))
        came.append(hello)
        if len(came) < 3:
            writer.transport.abort()  # as it breaks: without a goodbye of TLS
        await reader.read()

    async with deadline(waiting.LONG_S):
        settings_of_kind = {"unix": {}, "plain": {"TTP_TLS": "plain"}}.get(kind)
        if settings_of_kind is None:
            settings_of_kind = Authority(tmp_path / "signer").settings()
        node, settings = job.node(**settings_of_kind), config.load(settings_of_kind)
        invitation = Invitation.draw(credentials.kind_of(settings), False, "gate")
        rejected = Rejected("the gate")
        listener = AgentListener(invitation.secret, credentials.load(settings), rejected, welcome, first)
        if kind == "unix":
            invitation = invitation._replace(name=listener.open(credentials.UNIX, "", 0).address)
        else:
            invitation = invitation._replace(port=listener.listen("127.0.0.1", free_port()))
        await asyncio.to_thread(node.stay_at_gate, _at(invitation), 1, (1,))
        await came.changes.until(lambda: len(came) == 3)
        assert came[0].node == 1
        assert came[1:] == came[:1] * 2
        job.nodes.remove(node)
        await asyncio.to_thread(node.close)
        await listener.close()
        rejected.close()


async def test_a_gate_that_cannot_be_reached_stops_no_node(settings: config.Config) -> None:
    gate, invitation = await _opened(settings)
    await gate.close()
    me = MemberHello(1, (1,), "node1", 101)
    assert await stay_at_gate(invitation, "127.0.0.1", credentials.load(settings), me) is None


async def test_a_spare_goes_to_the_next_gate_after_the_loss_of_node_0(settings: config.Config) -> None:
    """The gate of node 1 has gone; the gate of node 2 serves spares after the take-over by its node."""
    context, kind = credentials.load(settings), credentials.kind_of(settings)
    first, gone = _gate(settings), _gate(settings)
    last = SpareGate(kind, free_port(), context, MINE, lambda: None)
    invitation, *later_invitations = [await gate.open("127.0.0.1") for gate in (first, gone, last)]
    members = []
    for node, later_invitation in enumerate(later_invitations, 1):
        me = MemberHello(node, (node,), "a", node, "", Gate("127.0.0.1", later_invitation.encode().decode()))
        members.append(await stay_at_gate(invitation, "127.0.0.1", context, me))
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(first, 1)
    await gone.close()
    assert first._listener is not None
    await first._listener.close()  # as the kernel does at the death of the agent: nobody is released
    store = Endpoint("127.0.0.1", 29500)
    last.begin_turn(store)
    await last.await_spares(1, waiting.LONG_S)
    (owner,) = (await last.fill({1: (0,)}, StartCounts(restarts=1, generations=1))).values()
    taken = await spare
    assert isinstance(taken, Taken)
    assert (taken.place.store, taken.place.owner) == (store, owner)
    taken.connection.close()
    await last.close()
    for member in members:
        assert member is not None
        member.close()


async def test_a_spare_loses_its_place_with_the_gate_before_it_has_come_to_the_controller(
    settings: config.Config,
) -> None:
    """The spare node waits again, at the gate of the node that takes over."""
    context, kind = credentials.load(settings), credentials.kind_of(settings)
    first, last = _gate(settings), SpareGate(kind, free_port(), context, MINE, lambda: None)
    invitation, at_last = await first.open("127.0.0.1"), _at(await last.open("127.0.0.1"))
    member = await stay_at_gate(invitation, "127.0.0.1", context, MemberHello(1, (1,), "a", 1, "", at_last))
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(first, 1)
    await first.fill({2: (2,)}, StartCounts(), incident=1)
    taken = await spare
    assert isinstance(taken, Taken)
    taken.require_gate()
    assert first._listener is not None
    await first._listener.close()  # as the kernel does at the death of the agent
    with pytest.raises(GateLostError):
        await asyncio.to_thread(taken.require_gate, waiting.LONG_S)
    gates = (taken.gate, *taken.gates)
    spare = asyncio.ensure_future(wait_at_gate(taken.gate, settings, MINE, taken.warm, gates))
    last.begin_turn()
    await _waits(last, 1)
    await last.close()
    assert await spare == SpareReleased()
    taken.connection.close()
    assert member is not None
    member.close()


def test_a_controller_is_lost_before_it_knows_the_spare_node(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection was accepted, and no address of another controller has come: the spare has no place."""
    monkeypatch.setenv(NEWCOMER, "")  # restored at the end
    node, drawn = job.node(TTP_HOST_COPY="0"), Invitation.draw("unix", False, "the job")

    async def leave(hello: AgentHello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert hello.owner == "the spare"

    async def open_controller() -> tuple[AgentListener[AgentHello], Endpoint]:
        rejected = agent_connections.RejectedConnections("the controller's port")
        listener = AgentListener(drawn.secret, None, rejected, leave, agent_connections.read_hello)
        return listener, listener.open(drawn.kind, "127.0.0.1", 0)

    listener, endpoint = node.control.thread.wait_for(open_controller())
    controller = _at(drawn._replace(name=endpoint.address))
    place = TakePlace(1, 0, 1, "the spare", 1, controller=controller)
    with socket.socket() as gate:
        taken = Taken(place, gate, WarmProcesses([], 0), controller)
        with pytest.raises(StartError):
            node.begin([1], 1, 2, 2, HashStore(), "127.0.0.1", taken=taken)
    node.control.thread.wait_for(listener.close())


async def test_a_spare_knows_the_gates_that_an_earlier_gate_has_named(settings: config.Config) -> None:
    """Node 0 is lost, then node 1, before other nodes have come to its gate; a spare node has."""
    context, kind = credentials.load(settings), credentials.kind_of(settings)
    gates = [SpareGate(kind, free_port(), context, MINE, lambda: None) for _ in range(4)]
    zero, first, two, of_a_spare = gates
    at = [_at(await gate.open("127.0.0.1")) for gate in gates]
    zero.begin_turn()
    spare = asyncio.ensure_future(wait_at_gate(at[0], settings, MINE, WarmProcesses([], 0)))
    await _waits(zero, 1)
    members = []
    for gate, node, number in ((0, 1, 1), (0, 2, 2), (1, 0, 3)):
        invitation = Invitation.decode(at[gate].invitation.encode(), kind)
        me = MemberHello(node, (node,), "a", node, "", at[number])
        if gate:
            first.begin_turn()
            assert zero._listener is not None
            await zero._listener.close()
            await _waits(first, 1)
        members.append(await stay_at_gate(invitation, "127.0.0.1", context, me))
    assert first._listener is not None
    await first._listener.close()
    two.begin_turn()
    await _waits(two, 1)
    of_a_spare.begin_turn()  # the spare, which has tried this gate, too, has left it
    assert (two.waiting, of_a_spare.waiting) == (1, 0)
    for opened in (two, of_a_spare):
        await opened.close()
    assert await spare == SpareReleased()
    for member in members:
        assert member is not None
        member.close()


async def test_a_spare_that_stays_over_a_restart_is_sent_to_the_store_of_the_new_node_0(
    settings: config.Config,
) -> None:
    """The flags of the spare name the lost store.

    The new node 0 serves spares at its take-over and at the restart.
    """
    gate, store = _gate(settings), Endpoint("127.0.0.1", 29500)
    gate.begin_turn(store)
    invitation = await gate.open("127.0.0.1")
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(gate, 1)
    gate.begin_turn()
    await gate.fill({1: (0,)}, StartCounts(restarts=2, generations=2))
    taken = await spare
    assert isinstance(taken, Taken)
    assert taken.place.store == store
    taken.connection.close()
    await gate.close()


@pytest.mark.parametrize("failed", [False, True])
async def test_a_spare_goes_home_when_the_job_is_over(failed: bool, settings: config.Config) -> None:
    gate, invitation = await _opened(settings)
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(gate, 1)
    await gate.close(failed=failed)
    assert await spare == SpareReleased(failed)


async def test_as_many_spares_meet_the_others_as_places_are_empty(settings: config.Config) -> None:
    """The others wait on; what the gate knew of nodes by their numbers is no more."""
    gate, invitation = await _opened(settings)
    spares = [
        asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
        for _ in range(2)
    ]
    hello = MemberHello(1, (1,), "a", 1)
    member = await stay_at_gate(invitation, "127.0.0.1", credentials.load(settings), hello)
    await _waits(gate, 2)
    gate.release(1)
    finished, waiting_on = await asyncio.wait(spares, return_when=asyncio.FIRST_COMPLETED)
    assert [spare.result() for spare in finished] == [SpareReleased(meets=True)]
    assert gate.waiting == 1
    assert member is not None
    member.close()
    assert await gate.fill({1: (1,)}, StartCounts())
    await asyncio.wait(waiting_on)
    assert not gate.gone
    await gate.close()
    for spare in waiting_on:
        taken = spare.result()
        assert isinstance(taken, Taken)
        taken.connection.close()


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (SpareHello({**MINE.facts, "--save": "/b"}, MINE.arguments, "x", 2), "--save is '/b' there and '/sh"),
        (
            SpareHello({**MINE.facts, "--nnodes": "3"}, MINE.arguments, "x", 2),
            "--nnodes is '3' there and '2'",
        ),
        (SpareHello(MINE.facts, ("--lr", "0.2"), "x", 2), "differ: '0.2' there, '0.1' on node 0"),
        (SpareHello(MINE.facts, ("--lr", "0.1", "-v"), "x", 2), "differ: '-v' is only there"),
        (SpareHello(MINE.facts, ("--lr",), "x", 2), "differ: '0.1' is only on node 0"),
    ],
)
async def test_a_spare_that_differs_is_refused(
    theirs: SpareHello, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_TLS", "plain")
    settings = config.load()
    gate, invitation = await _opened(settings)
    with pytest.raises(ConfigError, match=re.escape(message)):
        await wait_at_gate(_at(invitation), settings, theirs, WarmProcesses([], 0))
    assert gate.waiting == 0
    await gate.close()


async def test_a_fact_that_a_spare_does_not_know_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTP_TLS", "plain")
    settings = config.load()
    hello = SpareHello({}, MINE.arguments, "x", 2)
    gate, invitation = await _opened(settings)
    warm = WarmProcesses([], 0)
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, hello, warm))
    await _waits(gate, 1)
    await gate.close()
    assert await spare == SpareReleased()


def test_an_agent_that_was_taken_for_lost_cannot_come_back() -> None:
    store = HashStore()
    node0, lost = Places(store, 0, None), Places(store, 1, None)
    lost.require_own()
    node0.settle(1, {1: "a"})
    assert node0.are_filled(1)
    with pytest.raises(StartError, match="node 1 was taken for lost, and a spare node has its place"):
        lost.require_own()
    first = Places(store, 1, TakePlace(1, 1, 1, "a"))
    first.require_own()
    node0.settle(2, {})
    assert not first.are_filled(2)
    node0.settle(3, {1: "b"})
    with pytest.raises(StartError):
        first.require_own()
    Places(store, 1, TakePlace(1, 2, 3, "b")).require_own()


def test_a_node_that_has_had_workers_comes_back_as_a_spare_node() -> None:
    """Until its first start of workers, a process that is started again gets the number of the node back."""
    store = HashStore()
    first_process, second_process, other_node = (Places(store, node, None) for node in (1, 1, 2))
    second_process.require_first()
    first_process.note_start()
    with pytest.raises(PlaceLostError, match="has taken node 1 for lost"):
        second_process.require_first()
    other_node.require_first()


async def test_no_lease_is_claimed_before_a_spare_has_answered(
    settings: config.Config,
) -> None:
    """Otherwise the other side of a cut network, which has all spares, could not continue."""
    gate, waiting_at_claims = _gate(settings), []

    async def refuses() -> str:
        waiting_at_claims.append(gate.waiting)
        return "the other side goes on"

    invitation = await gate.open("127.0.0.1")
    assert await gate.fill({1: (1,)}, StartCounts(), refuses=refuses) == {}
    assert waiting_at_claims == []
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(gate, 1)
    assert await gate.fill({1: (1,)}, StartCounts(), refuses=refuses) == {}
    assert waiting_at_claims == [1]
    await gate.close()
    await spare


def test_a_node_finds_the_gate_of_the_controller_that_it_follows() -> None:
    """The same store holds the gate of the previous controller's node, which is lost."""
    store = HashStore()
    places = Places(store, 1, None)
    for term in (0, 2):
        places.announce(Gate(f"node of term {term}", "an invitation"), term)
    assert places.gate(2) == Gate("node of term 2", "an invitation")


async def test_spares_that_did_not_come_are_not_awaited_again(settings: config.Config) -> None:
    """First an online recovery needs them, then the restart."""
    gate = _gate(settings)
    gate.begin_turn()
    await gate.await_spares(1, 0.01)
    with pytest.raises(StopIteration):  # it returns without a wait
        gate.await_spares(1, waiting.LONG_S).send(None)


async def test_spares_leave_the_gate_of_a_former_controller(settings: config.Config) -> None:
    """All workers have started again, and node 0 has the controller; the spare connects to the gate of node
    0.
    """
    gate, first = _gate(settings), _gate(settings)
    invitation, first_invitation = await gate.open("127.0.0.1"), await first.open("127.0.0.1")
    me = MemberHello(0, (0,), "a", 1, "", _at(first_invitation))
    member = await stay_at_gate(invitation, "127.0.0.1", credentials.load(settings), me)
    spare = asyncio.ensure_future(wait_at_gate(_at(invitation), settings, MINE, WarmProcesses([], 0)))
    await _waits(gate, 1)
    gate.end_turn()
    await _waits(first, 1)
    assert gate.waiting == 0
    for opened in (gate, first):
        await opened.close()
    assert await spare == SpareReleased()
    assert member is not None
    member.close()


def test_all_nodes_end_where_one_has_waited_in_vain_for_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 waits for a disk meanwhile; it would meet nobody."""
    monkeypatch.setattr(places, "DECIDED_S", 0.1)
    store = HashStore()
    node0, unrelated = Places(store, 0, None), Places(store, 2, None)
    assert not unrelated.are_filled(1)
    assert not node0.settle(1, {1: "a"})
    assert not node0.are_filled(1)


def test_no_node_waits_longer_where_the_store_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that is switched off: its kernel sends no end of the connection."""
    monkeypatch.setattr(places, "DECIDED_S", 0.1)
    monkeypatch.setattr(places, "OPENED_S", 0.1)
    monkeypatch.setattr(rendezvous_waiting, "ANSWERS_S", 0.1)
    code = (
        "from torch.distributed import TCPStore\n"
        "store = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(store.port, flush=True)\n"
        "input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        try:
            port, limit = int(process.stdout.readline()), timedelta(seconds=0.1)
            store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=limit)
            process.send_signal(signal.SIGSTOP)
            assert not Places(store, 1, None).are_filled(1)
            assert Places(store, 1, None).gate(0) is None
            with pytest.raises(SilentStoreError, match="this node waited for the owners of places"):
                Places(store, 1, TakePlace(1, 1, 1, "a")).require_own()
        finally:
            process.kill()
    waiting.until(lambda: not is_abandoned(), "the threads have ended")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "2", "--node-rank", "1"], "--ttp-spare and --node-rank: a spare node has no place"),
        (["--nnodes", "1"], "--ttp-spare: give the job's own --nnodes (2 or more)"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "--ttp-spare: give the job's own --nnodes"),
        (["--nnodes", "2:3"], "--ttp-spare: --nnodes is 2:3, and spare nodes are for a fixed number"),
    ],
)
def test_a_spare_that_could_take_no_place_is_refused(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_TLS", "plain")  # as the flag does, which is undone after the test
    assert ttprun.main([flags.SPARE, "--ttp-tls", "plain", *arguments, __file__]) == ttprun.USAGE_EXIT_CODE
    assert f"ttprun: error: {message}" in capfd.readouterr().err


def test_the_flag_after_the_script_is_the_script_s() -> None:
    assert flags.without(flags.SPARE, ["--nnodes", "2", "x.py", "--ttp-spare"])[1] is False
    remaining, is_spare = flags.without(
        flags.SPARE, ["--ttp-tls", "plain", "--ttp-spare", "--nnodes", "2", "x.py"]
    )
    assert is_spare
    assert "--ttp-spare" not in remaining


def test_the_facts_that_node_0_compares() -> None:
    parsed = flags.parse(["--nnodes", "2", "--nproc-per-node", "4", "a/x.py", "--save", "/s", "--save=/t"])
    facts_of_node = spare_node.about_this_node(parsed, {"TTP_REPLICA": "split"})
    assert facts_of_node.facts["TTP_REPLICA"] == "split"
    assert facts_of_node.facts["--save"] == "/t"
    assert facts_of_node.facts["the script"] == "x.py"
    assert facts_of_node.facts["--nproc-per-node"] == "4"


async def test_a_restart_waits_for_a_spare_that_has_been_given_a_place(settings: config.Config) -> None:
    """The spare connects to a controller that ends with the generation; a spare that is late gets no
    place.
    """
    members = Membership(4)
    members.enter(AgentHello(1, (2, 3)))
    members.lose(1)
    members.expect({1: "a"})
    waited: list[float] = []
    claims: list[int] = []

    async def until_it_comes(condition: Callable[[], bool], limit_s: float) -> None:
        assert not condition()
        members.late.add(1)
        assert condition()

    async def in_vain(condition: Callable[[], bool], limit_s: float) -> None:
        assert not condition()
        waited.append(limit_s)

    async def refuses() -> str:
        claims.append(0)
        return "the other side goes on"

    gate, counts = _gate(settings), StartCounts(1, 1)
    assert await fill_for_restart(gate, members, (1,), counts, until_it_comes) == {1: "a"}
    members.late.clear()
    assert await fill_for_restart(gate, members, (1,), counts, until_it_comes, refuses) == {}
    assert len(claims) == 1
    members.late.clear()
    # The lease is not asked: it would name a store at which nobody meets.
    assert await fill_for_restart(gate, members, (1,), counts, in_vain, refuses) == {}
    assert len(claims) == 1
    assert waited == [COMES_S]
    assert members.expected == {}
