"""An accelerator of threads: the functions of torch.cuda and torch_npu.npu that `adaptor.devices` uses.

The functions have the arguments of the real functions, record their callers, and block in the same places: a
stream works in order, in a thread; synchronising waits for the stream. `Remote` is a tensor on the device.
Each kernel and each allocation of device memory is recorded.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

ERROR = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"

_VIEWS = {"detach", "alias", "view", "as_strided", "split", "slice", "_unsafe_view", "select"}
_NOTHING = {"is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"}


class Remote(torch.Tensor):
    """A tensor of the device; its memory is `there`."""

    machine: Machine
    there: torch.Tensor

    @staticmethod
    def __new__(cls, there: torch.Tensor, machine: Machine) -> Remote:
        remote = torch.Tensor._make_wrapper_subclass(
            cls,
            there.shape,
            strides=there.stride(),
            storage_offset=there.storage_offset(),
            dtype=there.dtype,
            device=machine.place,
        )
        remote.there, remote.machine = there, machine
        return remote

    def data_ptr(self) -> int:
        return self.there.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        remotes = [arg for arg in args if isinstance(arg, Remote)]
        machine = remotes[0].machine
        if name == "copy_" and not isinstance(args[0], Remote):
            return machine.copy(*args, **(kwargs or {}))
        if name not in _VIEWS | _NOTHING:
            machine.note("kernel", name)

        def inner(value: Any) -> Any:
            return value.there if isinstance(value, Remote) else value

        result = func(*tree_map(inner, args), **tree_map(inner, kwargs or {}))
        return tree_map(lambda v: Remote(v, machine) if isinstance(v, torch.Tensor) else v, result)


class Machine:
    """One device, with the interface of torch.cuda and of torch_npu.npu.

    error   raised by every further call, as after a fault of the device
    calls   (name of the thread, function, arguments): memory, streams, copies, kernels
    """

    def __init__(self, place: str) -> None:
        self.place = torch.device(place)
        self.error = ""
        self.calls: list[tuple[str, str, Any]] = []
        self.default = _Stream(self)
        self.made = [self.default]
        self._now = threading.local()
        machine = self

        class Stream(_Stream):
            def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
                assert not kwargs
                return object.__new__(cls)

            def __init__(self, device: Any = None, priority: int = 0) -> None:
                machine.note("Stream", (device, priority))
                super().__init__(machine)
                machine.made.append(self)

        class SyncLaunchStream(Stream):
            pass

        class Event:
            def __new__(
                cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
            ) -> Event:
                return object.__new__(cls)

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                machine.check()
                self._done = threading.Event()

            def record(self, stream: Any = None) -> None:
                machine.check()
                (stream or machine.current_stream()).put(self._done.set)

            def query(self) -> bool:
                machine.check()
                return self._done.is_set()

            def synchronize(self) -> None:
                machine.check()
                self._done.wait()
                machine.check()

        self.Stream, self.SyncLaunchStream, self.Event = Stream, SyncLaunchStream, Event

    def check(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def note(self, call: str, detail: Any = None) -> None:
        self.calls.append((threading.current_thread().name, call, detail))

    def called(self, call: str) -> list[Any]:
        return [detail for _, called, detail in self.calls if called == call]

    # as in torch.cuda and torch_npu.npu

    @contextmanager
    def device(self, device: Any) -> Any:
        self.check()
        device_before, self._now.device = getattr(self._now, "device", 0), device
        try:
            yield
        finally:
            self._now.device = device_before

    @contextmanager
    def stream(self, stream: Any) -> Any:
        stream_before, self._now.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._now.stream = stream_before

    def current_stream(self, device: Any = None) -> Any:
        self.check()
        return getattr(self._now, "stream", self.default)

    def synchronize(self, device: Any = None) -> None:
        self.check()
        self.note("synchronize", device)
        for stream in list(self.made):
            stream.synchronize()

    # what torch does on it

    def copy(self, into: torch.Tensor, source: Remote, non_blocking: bool = False) -> torch.Tensor:
        """Copy from the device to the host as torch does: other dtypes or strides need a kernel first."""
        self.check()
        assert getattr(self._now, "device", 0) == self.place, "the thread is on another device"
        stream = self.current_stream()
        if into.dtype != source.dtype or not (into.is_contiguous() and source.is_contiguous()):
            self.note("kernel", "a copy that converts")
        self.note("copy", stream)
        data = source.there
        stream.put(lambda: into.copy_(data))
        if not non_blocking:
            stream.synchronize()
        return into

    def put(self, tensor: torch.Tensor) -> Remote:
        return Remote(tensor, self)

    def close(self) -> None:
        """Whatever never ends does, and the streams."""
        for stream in self.made:
            stream.close()


class _Stream:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._queue: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._blocked = threading.Event()
        threading.Thread(target=self._work, name="stream", daemon=True).start()

    def _work(self) -> None:
        while work := self._queue.get():
            work()

    def close(self) -> None:
        """Stop the thread once its queue is done."""
        self.unblock()
        self._queue.put(None)

    def put(self, work: Callable[[], Any]) -> None:
        self._queue.put(work)

    def block(self) -> None:
        """Queue a kernel that never ends."""
        self._blocked = threading.Event()
        self._queue.put(self._blocked.wait)

    def unblock(self) -> None:
        self._blocked.set()

    def synchronize(self) -> None:
        self._machine.check()
        if self is self._machine.default:
            self._machine.note("synchronize the default stream")
        reached = threading.Event()
        self.put(reached.set)
        reached.wait()
        self._machine.check()
