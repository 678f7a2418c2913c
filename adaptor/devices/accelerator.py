"""Reads the state of a GPU or NPU beside a busy main thread, on other streams: the base of cuda and npu."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from adaptor.devices.device import Device
from adaptor.threads import Background, within

# Pinned memory through which copies go, two of it: one part arrives while the other is read.
_LANDING_BYTES = 1 << 25
_LANDINGS = 2
# A copy of four bytes takes some microseconds. Twice this, and once more for `release`, is less than the
# time that ranks of a job that hangs have for an answer (controller.freeze.HANG_ANSWER_S).
_PROBE_S = 1.0
# Communicators are aborted within milliseconds. Where that hangs, the main thread does so too, which is
# noticed after as long (`online.rejoin`).
_END_S = 10.0


class Accelerator(Device):
    """A `Device`. Made on the main thread, when training begins.

    All memory and streams for a dump are made here: an allocation of page-locked or device memory may wait
    for all streams of a device, and a stream may never end.

    Args:
        module: torch.cuda, or a module with its interface.
        device: with the device's index.
        stream: makes a stream that no process group uses.

    Attributes:
        release_spares_copies: `release` breaks no running copy to the host
    """

    release_spares_copies = False

    def __init__(self, module: Any, device: torch.device, stream: Callable[[], Any]) -> None:
        self._module = module
        self._device = device
        with module.device(device):
            self._copies = [stream() for _ in range(_LANDINGS)]
            self._probes = stream()
            self._one = torch.zeros(1, device=device)
        self._answer = torch.empty(1, pin_memory=True)
        self._landings = [
            torch.empty(_LANDING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_LANDINGS)
        ]
        self._end: Callable[[Callable[[], None]], None] = lambda act: None
        self._landings_are_free = threading.Lock()  # an abandoned dump may still be at its last copy

    def begin(self, end: Callable[[Callable[[], None]], None]) -> None:
        self._end = end

    def catch_up(self) -> None:
        self._module.current_stream(self._device).synchronize()

    def mark(self) -> Any:
        mark = self._module.Event(blocking=True)  # who waits for it sleeps
        mark.record()
        return mark

    def done(self, mark: Any) -> bool:
        if mark is None:
            return True
        try:
            return bool(mark.query())
        except RuntimeError:
            return True

    def wait(self, mark: Any, timeout_s: float) -> bool:
        return self.done(mark) or within(timeout_s, lambda: self._passed(mark)) is not None

    def _passed(self, mark: Any) -> bool:
        try:
            mark.synchronize()
        except RuntimeError:
            pass
        return True

    def beside(self) -> AbstractContextManager[None]:
        return self._on(self._copies[0])

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        # Both are a thread's own, and a new thread has the first device and its default stream. The device
        # comes first: to look at the stream of another one could make a context there.
        with self._module.device(self._device), self._module.stream(stream):
            yield

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        # The memory that it spans, as it lies there: to gather a view would be a kernel, and take memory.
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        host = torch.empty(span, dtype=tensor.dtype)
        self._bring(host, tensor.as_strided((span,), (1,)))
        host = host.as_strided(tensor.shape, tensor.stride())
        return host if span == tensor.numel() else host.clone()

    def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
        if tensor.dtype == into.dtype and tensor.is_contiguous() and tensor.device.type != "cpu":
            self._bring(into, tensor.detach().view(-1))
        else:
            into.copy_(self.to_host(tensor).reshape(-1))

    def _bring(self, into: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy part after part: during each part's copy, the previous part goes from pinned memory to `into`.

        A copy between contiguous tensors of one dtype is no kernel: with CUDA_DEVICE_MAX_CONNECTIONS=1, as
        Megatron sets the variable, a kernel would wait behind kernels of other streams.
        """
        size = _LANDING_BYTES // flat.element_size()
        on_their_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        with self._landings_are_free:
            for number, (part, place) in enumerate(
                zip(*(torch.split(tensor, size) for tensor in (flat, into)), strict=True)
            ):
                if len(on_their_way) == _LANDINGS:
                    self._land(*on_their_way.popleft())
                stream, memory = self._copies[number % _LANDINGS], self._landings[number % _LANDINGS]
                landing = memory.view(flat.dtype)[: part.numel()]
                with self._on(stream):
                    landing.copy_(part, non_blocking=True)
                    on_their_way.append((self.mark(), landing, place))
            while on_their_way:
                self._land(*on_their_way.popleft())

    def _land(self, mark: Any, landing: torch.Tensor, place: torch.Tensor) -> None:
        if not mark.query():
            self._wait_for_copy(mark)
        place.copy_(landing)

    def _wait_for_copy(self, mark: Any) -> None:
        """Wait for a copy, which on some devices is queued behind work of the main thread."""
        arrival = Background(lambda: _said(mark.synchronize), "ttp-device")
        # A machine that has no more threads runs no wait, and the copy arrives all the same.
        while (error := arrival.within(_PROBE_S)) is None and not mark.query():
            if self.release_spares_copies:
                within(_END_S, self._release)
        if isinstance(error, RuntimeError):
            raise error

    def unreadable(self, release: bool = True) -> str:
        probe_result = within(_PROBE_S, self._read)
        if probe_result is None and (release or self.release_spares_copies):
            within(_PROBE_S, self._release)
            probe_result = within(_PROBE_S, self._read)
        return f"it has not answered within {_PROBE_S:g} s" if probe_result is None else probe_result

    def _read(self) -> str:
        """Read something; return the device's error, empty after success."""
        try:
            with self._on(self._probes):
                self._answer.copy_(self._one, non_blocking=True)
                self._probes.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0] or type(error).__name__
        return ""

    def _release(self) -> bool:
        # Whatever is raised: what counts is whether something can be read now, or the main thread comes back.
        with contextlib.suppress(Exception):
            self._end(self._release_here)
        return True

    def _release_here(self) -> None:
        with self._module.device(self._device):
            self.release()

    def end_collectives(self) -> None:
        within(_END_S, self._release)

    def come_to_rest(self) -> None:
        self._module.synchronize(self._device)

    def release(self) -> None:
        """End work that never ends on the device; only where nothing can be read otherwise, or where the main
        thread is turned away.

        Later work in the main thread's stream then continues with numbers that nobody has reduced. Therefore
        the door is closed first, and no later step of this rank counts.
        """
        raise NotImplementedError


def _said(wait: Callable[[], object]) -> RuntimeError | str:
    """Return the device's error in a wait; an empty text after success."""
    try:
        wait()
    except RuntimeError as error:
        return error
    return ""
