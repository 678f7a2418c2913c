"""cuda and npu against stand-ins of their functions, which block in the same places."""

from __future__ import annotations

import inspect
import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adaptor import devices
from adaptor.devices import accelerator, cuda
from adaptor.devices.accelerator import Accelerator
from adaptor.devices.cuda import Cuda
from adaptor.devices.device import HOST
from adaptor.devices.npu import Npu
from adaptor.errors import UnsupportedError
from adaptor.threads import Background
from tests import waiting
from tests.device.conftest import LANDING, NAMES, SHORT_S, in_a_thread
from tests.device.recording import ERROR, Machine
from tests.unit.threads import LONG_S

TENSORS = {
    "one part": torch.arange(16.0),
    "many parts": torch.arange(1000.0),
    "half": torch.arange(77.0).to(torch.bfloat16),
    "count": torch.tensor(7.0),
    "flags": torch.tensor([True, False, True]),
    "none": torch.empty(0, 3),
    "matrix": torch.arange(60.0).view(5, 12),
    "part": torch.arange(60.0)[7:50],
    "column": torch.arange(60.0).view(5, 12)[:, 3],
    "turned": torch.arange(60.0).view(5, 12).t(),
    "repeated": torch.arange(5.0)[:, None].expand(5, 3),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=list(TENSORS))
def test_a_tensor_is_copied_while_the_default_stream_is_blocked(
    device: Accelerator, machine: Machine, tensor: torch.Tensor
) -> None:
    machine.default.block()
    copy = in_a_thread(lambda: device.to_host(machine.put(tensor)))
    assert copy.device.type == "cpu"
    assert copy.dtype == tensor.dtype
    assert torch.equal(copy, tensor)
    assert copy.untyped_storage().nbytes() == copy.nbytes  # or torch would save the rest of the storage, too
    assert machine.called("kernel") == []
    assert machine.default not in machine.called("copy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shard_is_copied_to_its_place(device: Accelerator, machine: Machine, dtype: torch.dtype) -> None:
    machine.default.block()
    tensor = torch.arange(100.0).to(dtype)
    into = torch.zeros(300)
    in_a_thread(lambda: device.copy(into[100:200], machine.put(tensor)) or True)
    assert torch.equal(into[100:200], tensor.float())
    assert not into[:100].any()
    assert not into[200:].any()
    assert machine.called("kernel") == []


def test_all_memory_and_all_streams_are_there_before_an_incident(
    device: Accelerator, machine: Machine
) -> None:
    machine.calls.clear()
    in_a_thread(lambda: device.to_host(machine.put(torch.arange(100.0))))
    assert in_a_thread(device.unreadable) == ""
    assert {call for _, call, _ in machine.calls} == {"copy"}


def test_streams_are_of_a_kind_that_process_groups_are_not_given(
    device: Accelerator, kind: str, machine: Machine
) -> None:
    device_streams = machine.made[1:]
    assert len(device_streams) == 3
    if kind == "cuda":
        assert {priority for _, priority in machine.called("Stream")} == {-1}
    else:
        assert all(isinstance(stream, machine.SyncLaunchStream) for stream in device_streams)


def test_copies_of_an_abandoned_dump_do_not_mix_with_those_of_the_next(
    device: Accelerator, machine: Machine
) -> None:
    tensors = [torch.full((500,), float(number)) for number in range(4)]
    copies: dict[int, torch.Tensor] = {}

    def copy(number: int) -> None:
        copies[number] = device.to_host(machine.put(tensors[number]))

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(len(tensors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(copies[number], tensor) for number, tensor in enumerate(tensors))


def test_a_mark_is_passed_when_the_stream_comes_there(device: Accelerator, machine: Machine) -> None:
    assert device.wait(device.mark(), LONG_S)
    machine.default.block()
    mark = device.mark()
    assert not device.done(mark)
    assert not device.wait(mark, 0.05)
    machine.default.unblock()
    assert device.wait(mark, LONG_S)
    assert device.done(mark)
    assert device.done(None)
    assert device.wait(None, 0)


def test_the_main_thread_catches_up_with_its_stream_alone(device: Accelerator, machine: Machine) -> None:
    machine.made[1].block()
    device.catch_up()
    assert machine.called("synchronize the default stream")


def test_a_device_that_has_failed_says_so(device: Accelerator, machine: Machine) -> None:
    mark = device.mark()
    machine.error = ERROR
    assert device.unreadable() == "CUDA error: an illegal memory access was encountered"
    assert device.done(mark)  # not awaited: its state cannot be read
    assert device.wait(mark, LONG_S)


class _Backend:
    """A backend of a process group that can be aborted."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._said, self._name = calls, name

    def abort(self) -> None:
        self._said.append(self._name)


_Backend2 = type("_Backend2", (), dict(vars(_Backend)))  # of torch 2.15: no subclass of the older one


class _Gloo:
    pass


def released(kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the calls that end hung work on the device; such a call ends the work."""
    calls: list[str] = []

    def end() -> None:
        for stream in machine.made:
            stream.unblock()

    if kind == "npu":
        machine.stop_device = lambda device_id: calls.append(f"stop {device_id}")  # type: ignore[attr-defined]
        machine.restart_device = (  # type: ignore[attr-defined]
            lambda device_id, rebuild_all_resources=False, disable_tensor_unsafe_check=False: (
                calls.append(f"restart {device_id}"),
                end(),
            )
        )
        return calls
    first, second = _Backend(calls, "abort 1"), _Backend2(calls, "abort 2")
    second.abort = lambda: (calls.append("abort 2"), end())  # type: ignore[method-assign]
    wrapped = SimpleNamespace(wrapped_pg=first)
    in_groups(monkeypatch, ("cuda", wrapped), ("cpu", _Gloo()), ("cuda", _Gloo()), ("cuda", second))
    return calls


def in_groups(monkeypatch: pytest.MonkeyPatch, *backends: tuple[str, Any]) -> None:
    """Set up a process group for each backend, on a kind of device."""
    groups = [
        SimpleNamespace(
            _device_types=[torch.device(name)], _get_backend=lambda device, found=availability: found
        )
        for name, availability in backends
    ]
    for name, backend in (("ProcessGroupNCCL", _Backend), ("ProcessGroupNCCL2", _Backend2)):
        monkeypatch.setattr(dist, name, backend, raising=False)
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_map=groups))  # only its keys are read


@pytest.mark.parametrize("kind", ["cuda"])
def test_there_is_a_thread_for_each_abort_before_an_incident(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequential aborts would wait for each other, and the machine may lack threads later."""
    prepared: list[int] = []
    monkeypatch.setattr(cuda, "reserve", SimpleNamespace(prepare=prepared.append))
    in_groups(monkeypatch)
    Cuda(machine.place)
    in_groups(monkeypatch, *(("cuda", _Backend([], "")) for _ in range(20)), ("cpu", _Gloo()))
    Cuda(machine.place)
    assert prepared[1] - prepared[0] == 20


def test_hung_work_is_ended_only_if_the_device_cannot_be_read(
    device: Accelerator, kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = released(kind, machine, monkeypatch)
    device.begin(lambda act: act())
    machine.default.block()
    assert device.unreadable() == ""
    assert calls == []
    for stream in machine.made:
        stream.block()
    # Only the first probe fails; the following work ends by itself.
    within, limits = accelerator.within, itertools.chain([SHORT_S], itertools.repeat(LONG_S))
    monkeypatch.setattr(accelerator, "within", lambda limit, act: within(next(limits), act))
    assert device.unreadable() == ""
    expected = {"cuda": ["abort 1", "abort 2"], "npu": ["restart 1", "stop 1"]}
    assert sorted(calls) == expected[kind]


def test_a_copy_queued_behind_hung_work_arrives_once_the_work_may_be_ended(
    device: Accelerator, kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one connection to the device a copy waits for an earlier copy that is queued behind a hung
    collective.
    """
    monkeypatch.setattr(accelerator, "_PROBE_S", SHORT_S)
    calls = released(kind, machine, monkeypatch)
    may_release = threading.Event()
    device.begin(lambda act: act() if may_release.is_set() else None)
    expected, copies = torch.arange(3 * LANDING), []
    remote = machine.put(expected)
    for stream in machine.made:
        stream.block()
    thread = threading.Thread(target=lambda: copies.append(device.to_host(remote)), daemon=True)
    thread.start()
    thread.join(3 * SHORT_S)
    assert thread.is_alive()
    assert calls == [], "in training the main thread's own work may take any time"
    may_release.set()
    if kind == "npu":  # to stop the device would break the copy
        thread.join(3 * SHORT_S)
        assert thread.is_alive()
        assert calls == []
        for stream in machine.made:
            stream.unblock()
    thread.join(LONG_S)
    assert torch.equal(copies[0], expected)
    assert kind == "npu" or sorted(set(calls)) == ["abort 1", "abort 2"]


def test_a_copy_arrives_where_no_thread_can_be_had_to_wait_for_it(
    device: Accelerator, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_PROBE_S", SHORT_S)
    looked = threading.Event()

    class NeverBegun:
        def __init__(self, act: Any, name: str) -> None:
            pass

        def within(self, limit_s: float) -> None:
            looked.set()

    expected, copies = torch.arange(3 * LANDING), []
    remote = machine.put(expected)
    for stream in machine.made:
        stream.block()
    monkeypatch.setattr(accelerator, "Background", NeverBegun)
    thread = threading.Thread(target=lambda: copies.append(device.to_host(remote)), daemon=True)
    thread.start()
    assert looked.wait(LONG_S)
    for stream in machine.made:
        stream.unblock()
    thread.join(LONG_S)
    assert torch.equal(copies[0], expected)


def test_aborts_that_hang_or_fail_take_their_time_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The user reads nothing about these aborts."""
    never, clock, limits = threading.Event(), [0.0], list[float]()

    class Hangs(Background[None]):
        def within(self, limit_s: float) -> None:
            limits.append(limit_s)
            clock[0] += limit_s

    def fail() -> None:
        raise RuntimeError("the future of the abort has timed out")

    backends = [_Backend([], name) for name in "123"]
    for backend, abort in zip(backends, (never.wait, never.wait, fail), strict=True):
        backend.abort = abort  # type: ignore[assignment, method-assign]
    in_groups(monkeypatch, *(("cuda", backend) for backend in backends))
    monkeypatch.setattr(cuda, "Background", Hangs)
    monkeypatch.setattr(cuda, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    cuda.Cuda.release(None)  # type: ignore[arg-type]
    assert limits == [cuda.ABORT_S, 0.0, 0.0]
    never.set()
    waiting.until(
        lambda: all(thread.name != "ttp-device" for thread in threading.enumerate()), "they are done"
    )
    assert "Traceback" not in capfd.readouterr().err


def test_nothing_is_aborted_where_torch_would_end_the_process_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    in_groups(monkeypatch, ("cuda", _Backend(calls, "abort")))
    level = dist.get_debug_level()
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        cuda.Cuda.release(None)  # type: ignore[arg-type]
        assert calls == []
    finally:
        dist.set_debug_level(level)
    cuda.Cuda.release(None)  # type: ignore[arg-type]
    assert calls == ["abort"]


def test_collectives_are_ended_where_the_main_thread_is_turned_away(
    device: Accelerator, kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = released(kind, machine, monkeypatch)
    machine.default.block()
    device.end_collectives()
    assert calls == [], "it was not asked whether the door is closed"
    device.begin(lambda act: act())
    device.end_collectives()
    device.come_to_rest()
    assert sorted(calls) == {"cuda": ["abort 1", "abort 2"], "npu": ["restart 1", "stop 1"]}[kind]
    assert machine.called("synchronize") == [machine.place]


def test_a_device_that_never_answers_is_given_up(
    device: Accelerator, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "_PROBE_S", SHORT_S)
    for stream in machine.made:
        stream.block()
    assert device.unreadable() == f"it has not answered within {SHORT_S:g} s"


def test_the_device_is_that_of_the_tensors(
    machine: Machine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_host, nowhere = torch.zeros(1), torch.empty(1, device="meta")
    on_device = SimpleNamespace(device=SimpleNamespace(type=kind, index=1))
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: on_host)
    assert devices.of([]) is HOST
    assert devices.of([on_host, nowhere]) is HOST
    device = devices.of([on_host, on_device, on_host])  # type: ignore[list-item]
    assert type(device) is (Cuda if kind == "cuda" else Npu)


def test_another_kind_of_device_is_refused() -> None:
    tensor: Any = SimpleNamespace(device=torch.device("xpu", 0))
    with pytest.raises(UnsupportedError, match=r"the model lies on xpu:0: .* from cpu, cuda, npu"):
        devices.of([tensor])


# torch's real functions, before a fixture replaces them
_REAL = {name: getattr(torch.cuda, name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_the_stand_ins_have_the_arguments_of_torch_s_own(name: str) -> None:
    def parameters(function_or_class: Any) -> list[str]:
        function = function_or_class
        if inspect.isclass(function_or_class):
            function = (
                function_or_class.__new__
                if "__new__" in vars(function_or_class)
                else function_or_class.__init__
            )
        names = list(inspect.signature(function).parameters)
        return [name for name in names if name not in ("cls", "self", "kwargs", "external")]

    machine = Machine("cuda:0")
    assert parameters(getattr(machine, name)) == parameters(_REAL[name])
    machine.close()
