"""The first checks on an NPU, run on its stand-in: each question can be answered with yes and with no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaptor.devices.npu import Npu
from tests.device import npu
from tests.device.conftest import SHORT_S
from tests.device.recording import Machine

Answers = Callable[..., list[str]]


@pytest.fixture
def kind() -> str:
    return "npu"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(npu.TENSORS, "float32", torch.arange(500.0))


@pytest.fixture
def answers(device: Npu, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Return a function that asks and returns the questions without a yes."""

    def ask(end: Callable[[Machine], None], last: str = "") -> list[str]:
        # `end`: what a stopped device does with unfinished work. `last`: the question after which an
        # answer may never come; all earlier answers come, however late.
        machine.stop_device = lambda device_id: None  # type: ignore[attr-defined]
        machine.restart_device = lambda device_id: end(machine)  # type: ignore[attr-defined]
        deviations = []
        for question, deviation in npu.questions(device, machine.put, machine.default.block):
            if deviation:
                deviations.append(f"{question}: {deviation}")
            if question == last:
                monkeypatch.setattr(npu, "LIMIT_S", SHORT_S)
        return deviations

    return ask


def goes_on(machine: Machine) -> None:
    for stream in machine.made:
        stream.unblock()


def test_the_stand_in_answers_all_questions_with_yes(answers: Answers) -> None:
    assert answers(goes_on) == []


def test_copies_wait_for_the_main_thread_s_stream(device: Npu, machine: Machine, answers: Answers) -> None:
    device._copies = [machine.default] * 2
    deviations = answers(goes_on, "a matrix, turned is copied bit for bit")
    assert deviations[0].startswith(
        "copies are made beside a stream that is busy: not of float32, bfloat16, a count"
    )


def test_a_stopped_device_keeps_its_queue(answers: Answers) -> None:
    deviations = answers(lambda machine: None, "and answers then")
    assert deviations == ["and what it had to do is over: not after a minute"]


def test_a_device_that_cannot_be_stopped(answers: Answers) -> None:
    def reserved(machine: Machine) -> None:
        raise RuntimeError("not supported")

    (first, *_) = answers(reserved, "the device is stopped and goes on")
    assert first == "the device is stopped and goes on: RuntimeError: not supported"


def test_random_states_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda count, device: draw(count))
    assert [problem for _, problem in npu.random_states(torch)] == ["", ""]
    state: Any = torch.get_rng_state()
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    torch.default_generator.set_state(state)
    assert [problem for _, problem in npu.random_states(torch)] == ["", "other numbers are drawn"]
