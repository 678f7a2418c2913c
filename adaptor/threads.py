"""Work in other threads: in threads started before they are needed (`reserve`), and in new threads (`start`).

In an incident a machine may refuse new threads (`pids.max`, RLIMIT_NPROC): the work of an incident runs in
threads that were started with the process.

No process waits at its end for the new threads: `concurrent.futures` joins its threads there, and a call may
hang for minutes in a function that no handler of a signal interrupts.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")

# Of a wait with a limit: the longest that a stretch counts in which this process does not run.
_SLICE_S = 0.1
# The calls that are made at the same time, ahead of the use of their results.
AT_ONCE = 4


class Reserve:
    """Runs jobs in existing threads, and starts more threads if all are busy and the machine allows more.

    A hanging job keeps its thread. A job without a thread waits for the next free thread.
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
        """Start threads until `count` exist, or the machine allows no more."""
        with self._lock, contextlib.suppress(RuntimeError):
            while self._threads < count:
                self._start()

    def run(self, name: str, job: Callable[[], object]) -> None:
        """Run `job` in a thread named `name` during the job.

        Raises:
            RuntimeError: no thread exists, and none can be started.
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
        """Let each thread end after its job."""
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
    """Wait until another thread of this process sets `event`, at most `limit_s`.

    Time in which the process is stopped, or gets no processor, hardly counts: the other thread has not run
    either.

    Returns:
        The rest of the limit in seconds; below zero after a time-out.
    """
    remaining_s = limit_s
    while not event.wait(min(_SLICE_S, max(0.0, remaining_s))):
        remaining_s -= _SLICE_S
        if remaining_s <= 0.0:
            return -1.0
    return max(0.0, remaining_s)


class Background(Generic[T]):
    """A call that may hang, made in another thread.

    Args:
        act: is called at once.
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
        """Return the result of the call; None after a time-out of `limit_s`, or an exception."""
        wait(self._done, limit_s)
        return self._found[0] if self._found else None


def within(limit_s: float, act: Callable[[], T], name: str = "ttp-device") -> T | None:
    """Return the result of `act`, called in a thread with this `name`, because `act` may hang.

    Returns None after `limit_s` seconds.
    """
    return Background(act, name).within(limit_s)


def start(work: Callable[[], T], name: str) -> Future[T] | None:
    """Make a call in a new thread; None where no thread can be had."""
    future: Future[T] = Future()
    try:
        threading.Thread(target=fulfil, args=(future, work), name=name, daemon=True).start()
    except RuntimeError:
        return None
    return future


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Make a call in a new thread, or in the current thread where no other can be had."""
    future = start(work, name)
    if future is None:
        future = Future()
        fulfil(future, work)
    return future


def call(work: Callable[[], T]) -> T:
    """Return the result of a call; on the main thread Ctrl-C ends the wait for the result."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    finished: queue.SimpleQueue[None] = queue.SimpleQueue()
    future: Future[T] = Future()

    def run() -> None:
        fulfil(future, work)
        finished.put(None)

    if start(run, "ttp-call") is None:
        return work()
    finished.get()  # not `result`: Ctrl-C during the release of its lock would become another error
    return future.result()


def fulfil(future: Future[T], work: Callable[[], T]) -> None:
    """Make a call, whose result or error the future then has; not a call that was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # the reader of the result gets the error
        future.set_exception(error)


def in_order(calls: Iterable[Callable[[], T]], name: str, at_once: int = AT_ONCE) -> Generator[Future[T]]:
    """Yield the results of calls in order, with a few calls running ahead, each in its own thread.

    Closed, it begins no more calls, and waits for none.

    Args:
        calls: the calls.
        name: of the threads.
        at_once: the largest number of calls at the same time.
    """
    waiting = deque[Future[T]]()
    for work in calls:
        waiting.append(begin(work, name))
        if len(waiting) >= at_once:
            yield waiting.popleft()
    yield from waiting


os.register_at_fork(after_in_child=reserve.forget)
