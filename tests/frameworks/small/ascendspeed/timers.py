"""Timers; a running timer cannot be started."""

from __future__ import annotations

import time

import torch.distributed as dist


class Timer:
    def __init__(self) -> None:
        self._elapsed, self._started, self._start_time = 0.0, False, time.time()

    def start(self, barrier: bool = False) -> None:
        assert not self._started
        if barrier:
            dist.barrier()
        self._start_time, self._started = time.time(), True

    def stop(self, barrier: bool = False) -> None:
        assert self._started
        if barrier:
            dist.barrier()
        self._elapsed += time.time() - self._start_time
        self._started = False

    def reset(self) -> None:
        self._elapsed, self._started = 0.0, False

    def elapsed(self, barrier: bool = False) -> float:
        self.stop(barrier)
        elapsed = self._elapsed
        self.reset()
        self.start(barrier)
        return elapsed


class Timers:
    def __init__(self) -> None:
        self._timers: dict[str, Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        return self._timers.setdefault(name, Timer())
