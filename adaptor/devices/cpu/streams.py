"""Streams and events: the only stream is the program itself, and all issued work has ended."""

from __future__ import annotations

import time
from abc import ABCMeta
from typing import Any

import torch

from adaptor.devices.cpu.placement import replace


class HostEvent:
    """An event that is complete as soon as it is recorded; keeps the time for `elapsed_time`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recorded = 0.0

    def record(self, stream: Any = None) -> None:
        self._recorded = time.perf_counter()

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to `end_event`."""
        return (end_event._recorded - self._recorded) * 1000.0

    def query(self) -> bool:
        """Return whether all work is done: always true on a CPU."""
        return True

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def wait(self, stream: Any = None) -> None:
        """Return at once: no work is pending."""


class Stream:
    """A stream on which all work is done as soon as it is issued."""

    cuda_stream = 0
    priority = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event or HostEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return whether all work is done: always true on a CPU."""
        return True

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def wait_event(self, event: HostEvent) -> None:
        """Return at once: no work is pending."""

    def wait_stream(self, stream: Stream) -> None:
        """Return at once: no work is pending."""


class StreamContext:
    """A stand-in for `torch.cuda.stream(...)` and `torch.cuda.device(...)`, with repeated entries."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the named stream or device: the CPU has a single stream."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc_info: object) -> None:
        return None


_ONLY = Stream()


def _register_with_the_compiler() -> None:
    """Let torch 2.4 import its compiler, which accepts only subclasses of its own abstract classes.

    Later versions of torch have no such classes.
    """
    try:
        from torch import _streambase
    except ImportError:
        return
    for name, stand_in in (("_EventBase", HostEvent), ("_StreamBase", Stream)):
        base = getattr(_streambase, name, None)
        if isinstance(base, ABCMeta):
            base.register(stand_in)


def install() -> None:
    """Replace streams and events of CUDA."""
    _register_with_the_compiler()
    classes = {
        "Event": HostEvent,
        "Stream": Stream,
        "ExternalStream": Stream,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "device": StreamContext,
        "device_of": StreamContext,
    }
    for name, stand_in in classes.items():
        setattr(torch.cuda, name, stand_in)
    replace(
        (torch.cuda,),
        {
            "current_stream": lambda device=None: _ONLY,
            "default_stream": lambda device=None: _ONLY,
            "set_stream": lambda stream: None,
            "is_current_stream_capturing": lambda: False,
        },
    )
