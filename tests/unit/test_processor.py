"""The processor of a worker with two controllers, one after the other."""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from adaptor import context
from adaptor.protocol import wire
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import (
    BoardRecord,
    Dump,
    Freeze,
    Frozen,
    GroupOrder,
    Hello,
    Modules,
    ModulesProbe,
    Phase,
    PresenceProbe,
    Present,
    TimelineEvent,
    ToWorker,
    Written,
)
from adaptor.worker import processor as processor_module
from adaptor.worker.processor import Processor
from adaptor.worker.script_imports import ScriptImports
from adaptor.worker.session import Session
from tests import waiting
from tests.unit.threads import LONG_S, Thread, wait_for_waiter, watched
from tests.unit.trainee import CountingTrainee, Loop


def test_a_new_controller_gets_the_state_left_by_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lost controller let the main thread through to step 5, not begun yet; the new one wants step 4."""
    event = threading.Event()
    monkeypatch.setattr(processor_module, "_leave", lambda code: event.set())
    monkeypatch.setattr(processor_module.abort_collectives, "shut_collectives", lambda keep, inodes: 0)
    memory = BoardMemory([0])
    board = Board(0, memory.path, memory.slots)
    session = Session(board, lambda *heard: None, lambda error: None)
    changed = watched(session.door)
    broken = threading.Event()
    trainee = CountingTrainee(barrier=lambda: assert_set(broken))
    loop = Loop(session, trainee)
    loop.begin(4)
    processor, agent = connected(tmp_path)

    def order(message: ToWorker) -> None:
        agent.sendall(wire.frame(message))

    def hears(kind: type) -> object:
        while (
            isinstance(message := wire.receive(agent, wire.from_worker), TimelineEvent)
            and kind is not TimelineEvent
        ):
            pass
        assert isinstance(message, kind)
        return message

    with agent:
        processor.start(session)
        hears(Hello)
        with Thread(loop.step, 5) as main:
            waiting.until(lambda: memory.read(0).phase == Phase.READY, "it waits at the door")
            order(Freeze(1))
            frozen = hears(Frozen)
            assert isinstance(frozen, Frozen)
            assert frozen.board.provides(5)
            order(dump(1, 5, tmp_path / "first"))
            wait_for_waiter(changed)  # the dump waits for the update
            order(Freeze(2))
            frozen = hears(Frozen)
            assert isinstance(frozen, Frozen)
            assert (frozen.incident, frozen.board.provides(4)) == (2, True)
            broken.set()
            wait_for_waiter(changed)  # the main thread, at the door
            (tmp_path / "second").mkdir()
            order(dump(2, 4, tmp_path / "second"))
            written = hears(Written)
            assert isinstance(written, Written)
            assert written.incident == 2
            assert (tmp_path / "second" / "g.txt.1").read_text().startswith("4 4 ")
            assert main.running
            order(dump(2, 5, tmp_path / "second"))
            hears(Written)
            main.result()
    assert_set(event)
    processor._connection.close()
    memory.close()


class Objects(type):
    """The metaclass of classes of another module; its code must not run when modules are listed."""

    is_asked = False

    @property
    def __mro__(cls) -> tuple[type, ...]:  # type: ignore[override]
        Objects.is_asked = True
        raise KeyboardInterrupt


@dataclass(frozen=True)
class AtWork:
    """A rank whose training has begun.

    Attributes:
        agent: the agent's end of its connection
        exited: is set once the process would end
    """

    session: Session
    agent: socket.socket
    exited: threading.Event


@pytest.fixture
def at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AtWork]:
    event = threading.Event()
    monkeypatch.setattr(processor_module, "_leave", lambda code: event.set())
    memory = BoardMemory([0])
    session = Session(Board(0, memory.path, memory.slots), lambda *heard: None, lambda error: None)
    Loop(session, CountingTrainee()).begin(4)
    processor, agent = connected(tmp_path)
    with agent:
        processor.start(session)
        assert isinstance(wire.receive(agent, wire.from_worker), Hello)
        yield AtWork(session, agent, event)
    assert_set(event)
    processor._connection.close()
    memory.close()


def test_a_sent_message_reaches_the_agent_before_the_thread_continues(tmp_path: Path) -> None:
    """The thread that answers the agent has not run: the layout reaches the agent even if the rank is killed
    at once.
    """
    processor, agent = connected(tmp_path)
    processor.say(Present(0, 1))
    processor.send(Present(0, 2))
    processor._connection.close()
    with agent:
        answers = [wire.receive(agent, wire.from_worker) for _ in range(2)]
        assert answers == [Present(0, 1), Present(0, 2)]
        assert agent.recv(1) == b""
    processor.send(Present(0, 3))  # the agent is gone: the answering thread ends the process


def test_modules_are_listed_once_without_code_of_their_objects(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another = types.ModuleType("of_another")
    of_another.Raises = Objects("Raises", (), {})  # type: ignore[attr-defined]
    of_another.function = secrets.token_hex  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "of_another", of_another)
    context.part(ScriptImports).names["of_another"] = b""  # at the end of its import
    agent = at_work.agent
    for _ in range(2):  # an agent asks again without an answer
        agent.sendall(wire.frame(ModulesProbe()))
    answer = wire.receive(agent, wire.from_worker)
    assert isinstance(answer, Modules)
    assert answer.names["of_another"]
    agent.sendall(wire.frame(PresenceProbe(1)))
    assert isinstance(wire.receive(agent, wire.from_worker), Present), "it looks once"
    assert not Objects.is_asked
    assert not at_work.exited.is_set()


def notes_before_frozen(agent: socket.socket) -> list[str]:
    """Return a rank's notes before its answer to a freeze."""
    agent.sendall(wire.frame(Freeze(1, stacks=True)))
    noted = []
    while not isinstance(message := wire.receive(agent, wire.from_worker), Frozen):
        assert isinstance(message, TimelineEvent)
        noted.append(message.what)
    return noted


def test_in_a_hang_collectives_are_noted_before_the_answer(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the answer this process may be ordered to exit at once."""
    session = at_work.session
    frozen, answer = threading.Event(), session.freezer.freeze

    def freezes(timeout_s: float, repeated: bool = False) -> BoardRecord | None:
        frozen.set()
        return answer(timeout_s, repeated)

    def write(path: Path) -> str:
        assert not frozen.wait(0.1)
        return "what was begun"

    monkeypatch.setattr(processor_module, "LOOK_S", LONG_S)
    monkeypatch.setattr(session.freezer, "freeze", freezes)
    monkeypatch.setattr(processor_module.stacks, "write_collectives", write)
    assert sorted(notes_before_frozen(at_work.agent)) == ["collectives", "stacks"]


def test_in_a_hang_it_answers_without_readable_collectives(
    at_work: AtWork, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(processor_module, "LOOK_S", 0.1)
    monkeypatch.setattr(processor_module.stacks, "write_collectives", lambda path: str(hangs.wait(LONG_S)))
    assert "collectives" not in notes_before_frozen(at_work.agent)
    hangs.set()


def connected(folder: Path) -> tuple[Processor, socket.socket]:
    """Return a processor and the agent's end of its connection."""
    address = f"ttp-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + address)
        listener.listen()
        processor = Processor(0, address, 10.0, 0, folder)
        agent, _ = listener.accept()
    agent.settimeout(LONG_S)
    return processor, agent


def assert_set(event: threading.Event) -> None:
    assert event.wait(LONG_S)


def dump(incident: int, step: int, folder: Path) -> Dump:
    return Dump(incident, 1, step, str(folder), (GroupOrder("g", (0,), 0),), "", 0, 10.0)
