"""Turns the adaptor's work in a step off and on in one job, and measures each part: for `_worker.py`.

In the off arm the session does nothing: no record, door, barrier, board, replica. Only the call of each patch
stays (microseconds), so `off` is the framework with the same groups. The copy of a mirror becomes outdated;
training never reads it.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from _blocks import Blocks

# The session's work in a step: (part, module, function); the time of a part excludes the parts called in it.
TIMED = (
    ("begin and end of a step", "adaptor.worker.session", "Session.begin_step"),
    ("begin and end of a step", "adaptor.worker.session", "Session.end_step"),
    ("begin and end of a step", "adaptor.worker.session", "Session.end_update"),
    ("begin and end of a step", "adaptor.worker.pace", "Pace.begin_phase"),
    ("begin and end of a step", "adaptor.worker.pace", "Pace.end_phase"),
    ("begin and end of the update", "adaptor.worker.session", "Session.before_update"),
    ("begin and end of the update", "adaptor.worker.session", "Session.after_update"),
    ("record of the step", "adaptor.checkpoint.trainee", "MegatronTrainee.take_record"),
    ("record at the door", "adaptor.checkpoint.trainee", "MegatronTrainee.snapshot_before_update"),
    ("random states", "adaptor.checkpoint.step_record", "take"),
    ("mirror: exchange", "adaptor.checkpoint.trainee", "MegatronTrainee.exchange"),
    ("mirror: update", "adaptor.checkpoint.trainee", "MegatronTrainee.update_replicas"),
    ("local copy", "adaptor.checkpoint.trainee", "MegatronTrainee.copy_state"),
    ("barrier", "adaptor.replica.group", "barrier"),
    ("door", "adaptor.worker.door", "Door.enter"),
    ("door", "adaptor.worker.door", "Door.leave"),
    ("board", "adaptor.protocol.board", "Board.write"),
)
PARTS = tuple(dict.fromkeys(part for part, _, _ in TIMED))
# The work of a step is switched off if these functions return at once.
SWITCHED = tuple((module, name) for _, module, name in TIMED if name.startswith(("Session.", "Pace.")))
COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather_object",
    "reduce_scatter_tensor",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
)


class Times:
    """The meters of a rank: milliseconds of wall and CPU time, and counts that the kernel keeps anyway.

    Args:
        hook: wraps a function once its module is imported.

    Attributes:
        parts: meters of the main thread by name, read where each part begins and ends.
        steps: meters of the whole process by name, read where a block begins and ends.
    """

    def __init__(self, hook: Callable[[str, str, Any], None]) -> None:
        self._collectives = 0
        for name in COLLECTIVES:
            hook("torch.distributed", name, self._counted)
        self.parts = {
            "wall": lambda: time.perf_counter_ns() / 1e6,
            "cpu": lambda: time.thread_time_ns() / 1e6,
        }
        self.steps = {
            "wall": lambda: time.perf_counter_ns() / 1e6,
            "cpu": lambda: time.process_time_ns() / 1e6,
            "switches": _switches,
            "faults": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
            "collectives": lambda: self._collectives,
        }

    def _counted(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self._collectives += 1
        return wrapped(*args, **kwargs)


def _switches() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


class Shares:
    """The amounts of each part by meter, without the parts that are called in it."""

    def __init__(self, meters: Times) -> None:
        self._reads = list(meters.parts.values())
        self.taken = {part: [0.0] * len(self._reads) for part in PARTS}
        self.calls = dict.fromkeys(PARTS, 0)
        self._inside: list[list[float]] = []  # for each running call: the amounts of parts called in it

    def measured(self, part: str, act: Callable[[], Any]) -> Any:
        self._inside.append([0.0] * len(self._reads))
        began = [read() for read in self._reads]
        try:
            return act()
        finally:
            took = [read() - start for read, start in zip(self._reads, began, strict=True)]
            inner = self._inside.pop()
            if self._inside:
                _add(self._inside[-1], took)
            _add(self.taken[part], [total - nested for total, nested in zip(took, inner, strict=True)])
            self.calls[part] += 1


def _add(totals: list[float], amounts: list[float]) -> None:
    totals[:] = [total + amount for total, amount in zip(totals, amounts, strict=True)]


class Parts:
    """The measurement of one rank.

    Args:
        add: writes a line of results.
        hook: wraps a function once its module is imported.
        settings: steps in a block, pairs of blocks, and the seed of their order.
    """

    def __init__(
        self,
        add: Callable[..., None],
        hook: Callable[[str, str, Any], None],
        settings: Sequence[str],
    ) -> None:
        block, pairs, seed = map(int, settings)
        self._on = True
        self._meters = Times(hook)
        self._shares = Shares(self._meters)
        self._began: dict[str, Any] = {}
        self._thread = threading.get_ident()
        for part, module, name in TIMED:
            hook(module, name, self._measured(part))
        for module, name in SWITCHED:  # after the meters, so outside of them
            hook(module, name, self._switched)
        blocks = Blocks(add, block, pairs, seed, turn=self._turn, begin=self._begin, end=self._end)
        hook("megatron.training.training", "train_step", blocks.step)

    def _measured(self, part: str) -> Any:
        def is_measured(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wrapped(*args, **kwargs)
            return self._shares.measured(part, lambda: wrapped(*args, **kwargs))

        return is_measured

    def _switched(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) if self._on else None

    def _turn(self, on: bool) -> None:
        self._on = on

    def _begin(self) -> None:
        self._began = self._now()

    def _now(self) -> dict[str, dict[str, float]]:
        taken, step_meters = self._shares.taken, self._meters.steps
        amounts = {
            name: {part: values[index] for part, values in taken.items()}
            for index, name in enumerate(self._meters.parts)
        }
        for name, read in step_meters.items():
            amounts.setdefault(name, {})["all"] = read()
        return {**amounts, "calls": dict(self._shares.calls)}

    def _end(self, steps: int) -> dict[str, dict[str, float]]:
        """Return the mean of a step: by meter, then by part and for "all"."""
        readings, began = self._now(), self._began
        return {
            name: {key: (readings[name][key] - began[name][key]) / steps for key in readings[name]}
            for name in readings
        }
