"""Threads that are there before they are needed.

In an incident a machine may have no more of them (`pids.max`, RLIMIT_NPROC): what has to be done then is done
by threads that were started when the process was.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# Of a wait with a limit: the longest that a stretch counts in which this process does not run.
_SLICE_S = 0.1


class Reserve:
    """Runs jobs in threads that exist already, and starts more where all are taken and one can be had.

    A job that hangs keeps its thread. A job for which there is none waits for the next that is free.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.forget()

    def forget(self) -> None:
        """Begin anew: the child of a fork has none of the threads."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        self._threads = 0
        self._taken = 0  # by jobs that run or wait

    def prepare(self, count: int) -> None:
        """Start threads until `count` are there, or no more can be had."""
        with self._lock, contextlib.suppress(RuntimeError):
            while self._threads < count:
                self._start()

    def run(self, name: str, job: Callable[[], object]) -> None:
        """Run `job` in a thread that is called `name` meanwhile.

        Raises:
            RuntimeError: there is no thread at all, and none can be had.
        """
        with self._lock:
            self._taken += 1
            if self._taken > self._threads:
                try:
                    self._start()
                except RuntimeError:
                    if not self._threads:
                        self._taken -= 1
                        raise
        self._jobs.put((name, job))

    def close(self) -> None:
        """Let the threads end, each when its job has."""
        with self._lock:
            for _ in range(self._threads):
                self._jobs.put(None)
            self._threads = 0

    def _start(self) -> None:
        threading.Thread(target=self._serve, args=(self._jobs,), name=self._name, daemon=True).start()
        self._threads += 1

    def _serve(self, jobs: queue.SimpleQueue[tuple[str, Callable[[], object]] | None]) -> None:
        thread = threading.current_thread()
        while (order := jobs.get()) is not None:
            thread.name, job = order
            try:
                job()
            except BaseException as error:  # its caller has not caught it: shown as Python shows it
                with contextlib.suppress(Exception):
                    threading.excepthook(threading.ExceptHookArgs((type(error), error, None, thread)))
            del job, order
            thread.name = self._name
            with self._lock:
                self._taken -= 1


# The reserve of this process.
reserve = Reserve("ttp-reserve")


def wait(event: threading.Event, limit_s: float) -> float:
    """Wait until another thread of this process sets `event`, `limit_s` at most.

    A time in which the process is stopped, or gets no processor, counts as little: that thread has not run
    either.

    Returns:
        The seconds that are left; below zero where it was not set.
    """
    remaining_s = limit_s
    while not event.wait(min(_SLICE_S, max(0.0, remaining_s))):
        remaining_s -= _SLICE_S
        if remaining_s <= 0.0:
            return -1.0
    return max(0.0, remaining_s)


class Background(Generic[T]):
    """A call that another thread makes, which may hang in it.

    Args:
        act: is called at once.
        name: of the thread meanwhile.
    """

    def __init__(self, act: Callable[[], T], name: str) -> None:
        self._act = act
        self._found: list[T] = []
        self._done = threading.Event()
        reserve.run(name, self._run)

    def _run(self) -> None:
        try:
            self._found.append(self._act())
        finally:
            self._done.set()

    def within(self, limit_s: float) -> T | None:
        """Return what the call has returned; None where it has not after `limit_s`, or has raised."""
        wait(self._done, limit_s)
        return self._found[0] if self._found else None


def within(limit_s: float, act: Callable[[], T], name: str = "ttp-device") -> T | None:
    """Return what `act` returns, called in a thread of this `name`, for it may hang.

    Returns None after `limit_s` seconds.
    """
    return Background(act, name).within(limit_s)


os.register_at_fork(after_in_child=reserve.forget)
