"""`machine`: an accelerator of threads in the place of torch.cuda, or of torch_npu."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.device.recording import Machine

NAMES = ("Event", "Stream", "current_stream", "device", "stream")


@pytest.fixture(params=["cuda", "npu"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine("meta:1")
    if kind == "cuda":
        for name in NAMES:
            monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    else:
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=made))
    _memory_is_written_down(made, monkeypatch)
    yield made
    made.close()


def _memory_is_written_down(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, zeros = torch.empty, torch.zeros

    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            machine.note("pinned memory")
        return empty(*args, **kwargs)

    def zero(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device != machine.place:
            return zeros(*args, device=device, **kwargs)
        machine.note("device memory")
        return machine.put(zeros(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", make)
    monkeypatch.setattr(torch, "zeros", zero)
