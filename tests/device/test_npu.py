"""What is tried first on a real NPU, on the stand-in for one: questions can be answered with yes and no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adaptor.devices.npu import Npu
from tests.device import npu
from tests.device.recording import Machine


@pytest.fixture
def kind() -> str:
    return "npu"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "LIMIT_S", 0.2)
    monkeypatch.setitem(npu.TENSORS, "float32", torch.arange(500.0))


def answers(device: Npu, machine: Machine, end: Callable[[Machine], None]) -> list[str]:
    """Those that are not yes; `end` is what a stopped device does with what it has not done."""
    machine.stop_device = lambda device_id: None  # type: ignore[attr-defined]
    machine.restart_device = lambda device_id: end(machine)  # type: ignore[attr-defined]
    return [
        f"{what}: {found}"
        for what, found in npu.questions(device, machine.put, machine.default.block)
        if found
    ]


def goes_on(machine: Machine) -> None:
    for stream in machine.made:
        stream.unblock()


@pytest.mark.usefixtures("small")
def test_all_is_as_it_is_relied_on(device: Npu, machine: Machine) -> None:
    assert answers(device, machine, goes_on) == []


@pytest.mark.usefixtures("small")
def test_copies_wait_for_the_main_thread_s_stream(device: Npu, machine: Machine) -> None:
    device._copies = [machine.default] * 2
    said = answers(device, machine, goes_on)
    assert said[0].startswith(
        "copies are made beside a stream that is busy: not of float32, bfloat16, a count"
    )


@pytest.mark.usefixtures("small")
def test_a_stopped_device_keeps_what_it_had_to_do(device: Npu, machine: Machine) -> None:
    said = answers(device, machine, lambda machine: None)
    assert said == ["and what it had to do is over: not after a minute"]


@pytest.mark.usefixtures("small")
def test_a_device_that_cannot_be_stopped(device: Npu, machine: Machine) -> None:
    def reserved(machine: Machine) -> None:
        raise RuntimeError("not supported")

    (first, *_) = answers(device, machine, reserved)
    assert first == "the device is stopped and goes on: RuntimeError: not supported"


def test_random_states_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda count, device: draw(count))
    assert [found for _, found in npu.random_states(torch)] == ["", ""]
    state: Any = torch.get_rng_state()
    monkeypatch.setattr(torch, "set_rng_state", lambda given: None)
    torch.default_generator.set_state(state)
    assert [found for _, found in npu.random_states(torch)] == ["", "other numbers are drawn"]
