"""Spare nodes at the gate of node 0: over an abstract socket, loopback TCP and TLS."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from adaptor import config
from adaptor.controller.membership import Membership
from adaptor.errors import ConfigError, StartError
from adaptor.launchers import (
    agent_connection,
    flags,
    invitation,
    last_line,
    spare_gate,
    spare_node,
    tls,
    ttprun,
)
from adaptor.launchers.agent_connection import connect
from adaptor.launchers.place_filling import COMES_S, fill_for_restart
from adaptor.launchers.places import Places
from adaptor.launchers.spare_gate import SpareGate
from adaptor.launchers.spare_node import stay_at_gate, wait_at_gate
from adaptor.launchers.start_counts import StartCounts
from adaptor.launchers.warm_start import WarmProcesses
from adaptor.protocol import wire
from adaptor.protocol.messages import AgentHello
from adaptor.protocol.spare_node_messages import (
    MemberHello,
    SpareAsked,
    SpareHello,
    SpareReady,
    TakePlace,
    to_spare_node,
)
from tests import waiting
from tests.certificates import Authority
from tests.ports import free_port

MINE = SpareHello({"--nnodes": "2", "--save": "/shared/a"}, ("--lr", "0.1"), "node0", 1)
PLACE = TakePlace(1, restarts=2, generations=3, owner="")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who answers may do so slowly, beside much other work; here each that does not has gone."""
    monkeypatch.setattr(spare_gate, "ANSWER_S", waiting.LONG_S)
    monkeypatch.setattr(agent_connection, "TRY_CONNECT_TIMEOUT_S", waiting.LONG_S)
    monkeypatch.setattr(agent_connection, "PROOF_S", waiting.LONG_S)


def _gate(settings: config.Config) -> SpareGate:
    return SpareGate(invitation.kind_of(settings), free_port(), tls.load(settings), MINE, lambda: None)


async def _waits(gate: SpareGate, count: int) -> None:
    await asyncio.to_thread(waiting.until, lambda: gate.waiting == count, f"{count} spares wait")


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


@pytest.fixture(params=["unix", "plain", "tls"])
def settings(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Config:
    given = {"unix": {}, "plain": {"TTP_TLS": "plain"}}.get(request.param)
    if given is None:
        given = Authority(tmp_path / "signer").settings()
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return config.load()


def test_the_places_of_lost_nodes_go_to_spares_that_are_there(settings: config.Config) -> None:
    """One of three has gone, so two lost nodes have a spare each; a third one has none."""

    async def work() -> None:
        gate = _gate(settings)
        found = await gate.open("127.0.0.1")
        spares = [
            asyncio.ensure_future(wait_at_gate(found, "127.0.0.1", settings, MINE, WarmProcesses([], 0)))
            for _ in range(3)
        ]
        await _waits(gate, 3)
        spares[0].cancel()
        await _waits(gate, 2)
        assert await gate.fill({1: (1,), 2: (2,), 3: (3,)}, StartCounts(restarts=2, generations=3)) == {}
        owners = await gate.fill({1: (1,), 2: (2,)}, StartCounts(restarts=2, generations=3))
        places = {taken.place.node: taken for taken in await asyncio.gather(*spares[1:]) if taken is not None}
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

    _run(work())


def test_a_spare_that_goes_while_another_one_is_asked_gets_no_place(settings: config.Config) -> None:
    async def work() -> None:
        gate = _gate(settings)
        found = await gate.open("127.0.0.1")

        async def answers(goes: bool) -> None:
            """Answer once: at once and go, or when the other one has gone."""
            where = (found.name, 0) if found.kind == invitation.UNIX else ("127.0.0.1", found.port)
            reader, writer = await connect(*where, found.secret, tls.load(settings))
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

    _run(work())


def test_the_end_of_an_agent_of_the_job_is_noticed_between_two_starts(settings: config.Config) -> None:
    """No controller is there then, which would notice it. It says nothing of a place that a spare has."""

    async def work() -> None:
        gate = _gate(settings)
        found = await gate.open("127.0.0.1")
        certificates = tls.load(settings)

        async def stays(node: int) -> socket.socket:
            me = MemberHello(node, (node,), f"node{node}", 100 + node)
            connection = await stay_at_gate(found, "127.0.0.1", certificates, me)
            assert connection is not None
            return connection

        first, second = await stays(1), await stays(2)
        spare = asyncio.ensure_future(wait_at_gate(found, "127.0.0.1", settings, MINE, WarmProcesses([], 0)))
        await _waits(gate, 1)
        assert gate.gone == {}
        first.close()
        await asyncio.to_thread(waiting.until, lambda: gate.gone, "the gate knows")
        assert gate.gone == {1: AgentHello(1, (1,), host="node1", pid=101)}
        await gate.fill({2: (2,)}, StartCounts(restarts=1, generations=1))
        taken = await spare
        assert taken is not None
        second.close()
        taken.connection.close()
        await asyncio.to_thread(waiting.until, lambda: 2 in gate.gone, "the gate knows")
        assert gate.gone[2].pid == MINE.pid
        await gate.close()

    _run(work())


def test_a_gate_that_cannot_be_reached_stops_no_node(settings: config.Config) -> None:
    async def work() -> None:
        gate = _gate(settings)
        found = await gate.open("127.0.0.1")
        await gate.close()
        me = MemberHello(1, (1,), "node1", 101)
        assert await stay_at_gate(found, "127.0.0.1", tls.load(settings), me) is None

    _run(work())


def test_a_spare_goes_home_when_the_job_is_over(settings: config.Config) -> None:
    async def work() -> None:
        gate = _gate(settings)
        found = await gate.open("127.0.0.1")
        spare = asyncio.ensure_future(wait_at_gate(found, "127.0.0.1", settings, MINE, WarmProcesses([], 0)))
        await _waits(gate, 1)
        await gate.close()
        assert await spare is None

    _run(work())


@pytest.mark.parametrize(
    ("theirs", "words"),
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
def test_a_spare_that_differs_is_refused(
    theirs: SpareHello, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_TLS", "plain")
    settings = config.load()

    async def work() -> None:
        gate = _gate(settings)
        found = await gate.open("127.0.0.1")
        with pytest.raises(ConfigError, match=re.escape(words)):
            await wait_at_gate(found, "127.0.0.1", settings, theirs, WarmProcesses([], 0))
        assert gate.waiting == 0
        await gate.close()

    _run(work())


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nnodes", "2", "--node-rank", "1"], "--ttp-spare and --node-rank: a spare node has no place"),
        (["--nnodes", "1"], "--ttp-spare: give the job's own --nnodes (2 or more)"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], "--ttp-spare: give the job's own --nnodes"),
        (["--nnodes", "2:3"], "--ttp-spare: --nnodes is 2:3, and spare nodes are for a fixed number"),
    ],
)
def test_a_spare_that_could_take_no_place_is_refused(
    arguments: list[str], words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTP_TLS", "plain")  # as the flag does, which is undone after the test
    assert ttprun.main([flags.SPARE, "--ttp-tls", "plain", *arguments, __file__]) == last_line.USAGE_EXIT_CODE
    assert f"ttprun: error: {words}" in capfd.readouterr().err


def test_the_flag_after_the_script_is_the_script_s() -> None:
    assert flags.without(flags.SPARE, ["--nnodes", "2", "x.py", "--ttp-spare"])[1] is False
    rest, found = flags.without(flags.SPARE, ["--ttp-tls", "plain", "--ttp-spare", "--nnodes", "2", "x.py"])
    assert found
    assert "--ttp-spare" not in rest


def test_what_node_0_compares() -> None:
    parsed = flags.parse(["--nnodes", "2", "--nproc-per-node", "4", "a/x.py", "--save", "/s", "--save=/t"])
    mine = spare_node.about_this_node(parsed)
    assert mine.facts["--save"] == "/t"
    assert mine.facts["the script"] == "x.py"
    assert mine.facts["--nproc-per-node"] == "4"


def test_a_restart_waits_for_a_spare_that_was_told_to_take_a_place(settings: config.Config) -> None:
    """The controller that it is to find ends with the generation; who does not come in time has no place."""
    members = Membership(4)
    members.enter(AgentHello(1, (2, 3)))
    members.lose(1)
    members.expect({1: "a"})
    waited: list[float] = []

    async def until_it_comes(done: Callable[[], bool], limit_s: float) -> None:
        assert not done()
        members.late.add(1)
        assert done()

    async def in_vain(done: Callable[[], bool], limit_s: float) -> None:
        assert not done()
        waited.append(limit_s)

    async def work() -> None:
        gate, counts = _gate(settings), StartCounts(1, 1)
        assert await fill_for_restart(gate, members, (1,), counts, until_it_comes) == {1: "a"}
        members.late.clear()
        assert await fill_for_restart(gate, members, (1,), counts, in_vain) == {}
        assert waited == [COMES_S]
        assert members.expected == {}

    _run(work())
