"""The counts of `step_counts.py` in a worker, for `_parts.py`: figures that do not depend on the load.

A profile of torch, which marks the parts, counts collectives and allocations of tensors of the main thread.
It runs in both arms.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from _counters import HARDWARE, INSTRUCTIONS, Counter, SentBytes, why_no_instructions
from _parts import PARTS

_MARK = "part: "
_ALLOCATION = "[memory]"
# The names of torch.distributed's operations in a profile.
_OPERATION = "c10d::"
_MESSAGES = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")


class Counts:
    """The counters, and the profile of a block."""

    def __init__(self) -> None:
        self._sent = SentBytes()
        self._profile: Any = None
        self._peaks = Peaks()
        self.parts: dict[str, Callable[[], float]] = {
            "sent": self._sent.read,
            "switches": lambda: resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw,
        }
        if not why_no_instructions():
            self.parts["instructions"] = Counter(HARDWARE, INSTRUCTIONS).read
        self.steps = self.parts

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        if self._profile is None:
            yield
            return
        from torch.profiler import record_function

        with record_function(_MARK + part), self._peaks.within(part):
            yield

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._sent.find()
        self._peaks = Peaks()
        # Never stopped: gloo's threads that allocate meanwhile would end the process (CPython gh-128679).
        tracemalloc.start()
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()

    def end(self, steps: int) -> Mapping[str, Mapping[str, float]]:
        profile, self._profile = self._profile, None
        profile.stop()
        events = profile.profiler.kineto_results.events()
        counts = by_part(Event(e.name(), e.start_ns(), e.duration_ns(), e.nbytes()) for e in events)
        means = {
            name: {part: amount / steps for part, amount in amounts.items()}
            for name, amounts in counts.items()
        }
        return {**means, "python": {**dict.fromkeys(PARTS, 0.0), **self._peaks.of_a_step()}}


class Peaks:
    """The largest Python memory while a part runs, above the memory at its start, in bytes.

    Unlike a counter it includes the parts that are called in it.
    """

    def __init__(self) -> None:
        self._inside: list[int] = []  # the peak of each running part
        self._peaks: dict[str, list[int]] = {}

    @contextlib.contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Run a part."""
        began = self._turn()
        self._inside.append(began)
        try:
            yield
        finally:
            self._turn()
            peak = self._inside.pop()
            if self._inside:
                self._inside[-1] = max(self._inside[-1], peak)
            self._peaks.setdefault(part, []).append(peak - began)

    def _turn(self) -> int:
        """Update the peak of the innermost running part; return the current memory."""
        size, peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        if self._inside:
            self._inside[-1] = max(self._inside[-1], peak)
        return size

    def of_a_step(self) -> dict[str, float]:
        """Return the peak of each part: the median over its calls."""
        return {part: statistics.median(values) for part, values in self._peaks.items()}


class Event(NamedTuple):
    """An event of a profile, in nanoseconds; `nbytes`: allocated bytes, negative if freed."""

    name: str
    start: int
    duration: int
    nbytes: int


def by_part(events: Iterable[Event]) -> dict[str, dict[str, float]]:
    """Count the events of one thread by kind, then by their innermost part and for "all".

    Returns:
        The counts of "collectives", "messages" sent, "allocations", and their bytes, "allocated".
    """
    counts = {
        name: dict.fromkeys((*PARTS, "all"), 0.0)
        for name in ("collectives", "messages", "allocations", "allocated")
    }
    inside: list[Event] = []  # the marks that have not ended
    for event in sorted(events, key=lambda event: (event.start, -event.duration)):
        while inside and inside[-1].start + inside[-1].duration <= event.start:
            inside.pop()
        if event.name.startswith(_MARK):
            inside.append(event)
            continue
        amounts = {}
        if event.name == _ALLOCATION and event.nbytes > 0:
            amounts = {"allocations": 1, "allocated": event.nbytes}
        elif event.name == _MESSAGES[0]:
            amounts = {"messages": 1}
        elif event.name.startswith(_OPERATION) and event.name not in _MESSAGES:
            amounts = {"collectives": 1}
        for name, amount in amounts.items():
            counts[name]["all"] += amount
            if inside:
                counts[name][inside[-1].name.removeprefix(_MARK)] += amount
    return counts
