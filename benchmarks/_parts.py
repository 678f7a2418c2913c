"""Turns the adaptor's work in a step off and on in one job, and measures each part of it: for `_worker.py`.

Off, the session does nothing: no record, door, barrier, board, replica. What stays is a look at each patch
(microseconds), so `off` is the framework with the same groups. The copy of a mirror falls behind meanwhile;
training never reads it. Every rank turns at the same step, in an order that is drawn beforehand.
"""

from __future__ import annotations

import os
import random
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

ARMS = ("off", "on")
# Steps before the first block: memory is found, and the first steps of a process are unlike the others.
WARM_UP = 8
# What the session does in a step: (part, module, function); a part has the time of those in it taken out.
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
    ("random states", "adaptor.checkpoint.rng", "take"),
    ("mirror: exchange", "adaptor.checkpoint.trainee", "MegatronTrainee.exchange"),
    ("mirror: update", "adaptor.checkpoint.trainee", "MegatronTrainee.update_replicas"),
    ("local copy", "adaptor.checkpoint.trainee", "MegatronTrainee.copy_state"),
    ("barrier", "adaptor.replica.group", "barrier"),
    ("door", "adaptor.worker.door", "Door.enter"),
    ("door", "adaptor.worker.door", "Door.leave"),
    ("board", "adaptor.protocol.board", "Board.write"),
)
PARTS = tuple(dict.fromkeys(part for part, _, _ in TIMED))
# Nothing of a step is done where these return at once.
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


class Clocks:
    """Time of the main thread by part, each without the parts that are called in it."""

    def __init__(self) -> None:
        self.wall = dict.fromkeys(PARTS, 0)
        self.cpu = dict.fromkeys(PARTS, 0)
        self.calls = dict.fromkeys(PARTS, 0)
        self._inside: list[list[int]] = []  # of each call that has not returned: what others took in it

    def timed(self, part: str, act: Callable[[], Any]) -> Any:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        self._inside.append([0, 0])
        try:
            return act()
        finally:
            wall, cpu = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
            inner = self._inside.pop()
            if self._inside:
                self._inside[-1][0] += wall
                self._inside[-1][1] += cpu
            self.wall[part] += wall - inner[0]
            self.cpu[part] += cpu - inner[1]
            self.calls[part] += 1


class Parts:
    """The measurement of one rank.

    Args:
        add: writes a line down.
        hook: wraps a function once its module is imported.
        given: steps in a block, pairs of blocks, and the seed of their order.
    """

    def __init__(self, add: Callable[..., None], hook: Callable[[str, str, Any], None], given: str) -> None:
        self._block, pairs, seed = map(int, given.split(","))
        source = random.Random(seed)
        self._order = [arm for _ in range(pairs) for arm in source.sample(ARMS, k=2)]
        self._add = add
        self._on = True
        self._steps = 0
        self._clocks = Clocks()
        self._collectives = 0
        self._began: dict[str, Any] = {}
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
        self._thread = threading.get_ident()
        for part, module, name in TIMED:
            hook(module, name, self._timed(part))
        for module, name in SWITCHED:  # outside of the clocks
            hook(module, name, self._switched)
        for name in COLLECTIVES:
            hook("torch.distributed", name, self._counted)
        hook("megatron.training.training", "train_step", self._step)

    def _timed(self, part: str) -> Any:
        def is_timed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return wrapped(*args, **kwargs)
            return self._clocks.timed(part, lambda: wrapped(*args, **kwargs))

        return is_timed

    def _switched(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs) if self._on else None

    def _counted(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        self._collectives += 1
        return wrapped(*args, **kwargs)

    def _step(self, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        self._steps += 1
        block, step = divmod(self._steps - WARM_UP, self._block)
        if self._steps < WARM_UP or block > len(self._order):
            return result
        if step == 0:  # a block ends, and the next begins
            if self._began:
                self._add("block", 0.0, arm=self._order[block - 1], **self._since())
            self._began = {}
            self._on = self._order[block] == "on" if block < len(self._order) else True
        elif step == 1:  # the first step of a block pays for what the one before has left
            self._began = self._now()
        return result

    def _now(self) -> dict[str, Any]:
        usage, clocks = resource.getrusage(resource.RUSAGE_SELF), self._clocks
        return {
            "wall": time.perf_counter_ns() / 1e6,
            "cpu": time.process_time_ns() / 1e6,
            "switches": usage.ru_nvcsw + usage.ru_nivcsw,
            "faults": usage.ru_minflt,
            "collectives": self._collectives,
            "parts": {part: clocks.wall[part] / 1e6 for part in PARTS},
            "parts_cpu": {part: clocks.cpu[part] / 1e6 for part in PARTS},
            "calls": dict(clocks.calls),
        }

    def _since(self) -> dict[str, Any]:
        """Return what a step of the block took, in the mean: milliseconds, and numbers."""

        def mean(now: Any, began: Any) -> Any:
            if isinstance(now, dict):
                return {name: mean(now[name], began[name]) for name in now}
            return (now - began) / (self._block - 1)

        found: dict[str, Any] = mean(self._now(), self._began)
        return found
