"""A rank with weights and optimizer state on a device that hangs, and a rank that is not READY yet."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint.trainee import MegatronTrainee
from adaptor.checkpoint.training_state import TrainingState
from adaptor.devices.accelerator import Accelerator
from adaptor.devices.device import HOST, Device
from adaptor.protocol import naming
from adaptor.protocol.messages import GroupOrder
from adaptor.protocol.state_provider import DumpRun
from tests.device.conftest import SHORT_S, in_a_thread
from tests.device.recording import Machine
from tests.unit.test_checkpoint_dump import RECORD, Rank
from tests.unit.threads import LONG_S


def on_the_machine(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank with all shards, whose weights and optimizer state are on the machine."""
    full = torch.full
    with monkeypatch.context() as patched:
        patched.setattr(torch, "full", lambda *args, **kwargs: machine.put(full(*args, **kwargs)))
        rank = Rank(0, 1)
    for state in rank.states.values():
        state.update({key: machine.put(tensor) for key, tensor in state.items()})
    rank.model.frozen = torch.nn.Parameter(machine.put(torch.arange(4.0)), requires_grad=False)
    rank.model.register_buffer("mask", machine.put(torch.ones(2, dtype=torch.bool)))
    return rank


def trainee_on(device: Device, state: TrainingState, save: Path | str = "") -> MegatronTrainee:
    unused: Any = None
    trainee = MegatronTrainee(state, str(save), (), unused, dict, dict, int, lambda: None)
    vars(trainee)["device"] = device  # instead of the device of its tensors
    return trainee


def test_a_rank_is_ready_once_its_stream_has_reached_the_update(
    device: Accelerator, machine: Machine
) -> None:
    machine.default.block()
    thread = threading.Thread(target=trainee_on(device, Rank(0, 1).state).exchange, daemon=True)
    thread.start()
    thread.join(SHORT_S)
    assert thread.is_alive()
    machine.default.unblock()
    thread.join(LONG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("in_place", [False, True])
def test_last_words_are_written_while_the_default_stream_is_blocked(
    device: Accelerator, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_place: bool
) -> None:
    rank = on_the_machine(machine, monkeypatch)
    record = dataclasses.replace(
        RECORD,
        scalers=({"scale": machine.put(torch.tensor([8.0]))},),
        buffers=(machine.put(torch.tensor([True, False])),),
    )
    order = GroupOrder("mp_rank_00", (0,), 0)
    machine.default.block()
    machine.calls.clear()
    for state, taken, trainee_device in ((rank.state, record, device), (Rank(0, 1).state, RECORD, HOST)):
        folder = (
            tmp_path / ("host" if trainee_device is HOST else "device") / naming.temporary_name(RECORD.step)
        )
        folder.mkdir(parents=True)
        run = DumpRun(
            0,
            str(folder),
            1,
            lambda ranks: None,
            lambda count: None,
            lambda: False,
            past=False,
            in_place=in_place,
        )
        trainee = trainee_on(trainee_device, state, folder.parent)
        in_a_thread(lambda trainee=trainee, taken=taken, run=run: trainee.dump(taken, order, run))
    assert {call for _, call, _ in machine.calls} == {"copy"}
    files = [path.relative_to(tmp_path / "host") for path in (tmp_path / "host").rglob("*.1")]
    assert len(files) == 2
    for file in files:
        written, expected = (
            torch.load(tmp_path / trainee_device / file, weights_only=False)
            for trainee_device in ("device", "host")
        )
        same(written, expected)


def same(written: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert type(written) is type(expected)
        assert written.dtype == expected.dtype
        assert torch.equal(written, expected)
    elif isinstance(expected, dict):
        assert list(written) == list(expected)
        for key in expected:
            same(written[key], expected[key])
    elif isinstance(expected, list):
        assert len(written) == len(expected)
        for pair in zip(written, expected, strict=True):
            same(*pair)
    else:
        assert written == expected
