"""The steps that a rank still provides after an exception leaves the training script."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptor.devices.device import HOST
from adaptor.protocol.board import Board, BoardMemory
from adaptor.protocol.messages import Phase
from adaptor.worker.session import Session

INNER = SimpleNamespace()


def _session(barrier: Any = lambda: None, has_local_copy: bool = False) -> Session:
    memory = BoardMemory([0])
    trainee: Any = SimpleNamespace(
        save_folder="",
        shares=(),
        device=HOST,
        take_record=lambda step: None,
        snapshot_before_update=lambda: None,
        has_local_copy=has_local_copy,
        copy_state=lambda: None,
        barrier=barrier,
        exchange=lambda: None,
        update_replicas=lambda: None,
        has_state=lambda: True,
    )
    session = Session(Board(0, memory.path, memory.slots), lambda *_: None, lambda *_: None)
    session.begin_training(trainee, [INNER], 4)
    session.begin_step(5)
    return session


def test_between_two_updates_nothing_changes() -> None:
    session = _session()
    session.window.give_up()
    board = session.freezer.freeze(1)
    assert board.phase == Phase.RUNNING
    assert board.provides(4)


def test_at_the_door_the_step_behind_it_is_not_promised() -> None:
    def interrupted() -> None:
        raise SystemExit

    session = _session(interrupted)
    with pytest.raises(SystemExit):
        session.before_update(INNER)
    assert session.freezer.freeze(1).provides(5)
    session.window.give_up()
    board = session.freezer.freeze(1)
    assert board.provides(4)
    assert not board.provides(5)


def test_inside_the_update_the_state_is_that_of_no_step() -> None:
    session = _session()
    session.before_update(INNER)
    session.window.give_up()
    board = session.freezer.freeze(1)
    assert not board.provides(4)
    assert not board.provides(5)


def test_inside_the_update_a_local_copy_has_the_step_before() -> None:
    session = _session(has_local_copy=True)
    session.before_update(INNER)
    session.window.give_up()
    board = session.freezer.freeze(1)
    assert board.provides(4)
    assert not board.provides(5)
