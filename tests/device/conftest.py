"""`machine`: an accelerator made of threads that replaces torch.cuda or torch_npu."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor.devices import accelerator
from adaptor.devices.accelerator import Accelerator
from adaptor.devices.cuda import Cuda
from adaptor.devices.npu import Npu
from tests import waiting
from tests.device.recording import Machine
from tests.unit.threads import LONG_S

LANDING = 64  # bytes, so that small tensors take several parts
SHORT_S = 0.2  # limit for work that never ends
NAMES = ("Event", "Stream", "current_stream", "device", "stream", "synchronize")


@pytest.fixture(params=["cuda", "npu"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(kind: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine_under_test = Machine("meta:1")
    if kind == "cuda":
        for name in NAMES:
            monkeypatch.setattr(torch.cuda, name, getattr(machine_under_test, name))
    else:
        monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(npu=machine_under_test))
    _memory_is_written_down(machine_under_test, monkeypatch)
    yield machine_under_test
    # Abandoned work may start only now, and must not call torch's real functions.
    for stream in machine_under_test.made:
        stream.unblock()
    # A reserve thread has that name while it is busy.
    waiting.until(
        lambda: all(thread.name != "ttp-device" for thread in threading.enumerate()), "they are done"
    )
    machine_under_test.close()


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


@pytest.fixture
def device(kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    monkeypatch.setattr(accelerator, "_LANDING_BYTES", LANDING)
    monkeypatch.setattr(accelerator, "_PROBE_S", LONG_S)
    return Cuda(machine.place) if kind == "cuda" else Npu(machine.place)


def in_a_thread(act: Any) -> Any:
    """Return the result of `act`, run in the thread of a dump."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(act()), name="dump", daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert results, "it hangs"
    return results[0]
