"""Requests to a store: repeated while the store is busy, made in threads, and made ahead of their use.

A client waits for an answer in a function that no Python signal handler interrupts, for minutes if the store
is silent, and the end of a process joins the threads of `concurrent.futures`. So a request of the main thread
is made in another thread, and all threads here are daemons: Ctrl-C and an error end the process at once.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from adaptor.errors import StoreError

# A store that is restarted, or fails over, is usually back within a minute. A wrong address is reported at
# the first request, some seconds after the start.
RETRY_S = 60.0
# The parts of one object that are on their way at the same time. With the size of a part this bounds memory.
AT_ONCE = 4

T = TypeVar("T")


class BusyError(StoreError):
    """The store does not answer, or is busy; a later attempt may succeed."""


class Backoff:
    """The waiting times before attempts: each is twice the last, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next(self) -> float:
        """Return the seconds to wait before the next attempt."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s

    def reset(self) -> None:
        """Begin again with the first waiting time, after a success."""
        self._next_s = self._first_s


class Retrying:
    """Repeats requests while the store is busy.

    Args:
        tell: prints the line that a store is awaited; None: no line.
        seconds: for which a request is repeated.
        clock: in seconds.
        sleep: waits for a number of seconds.
        first_s: seconds before the first repetition.
        longest_s: the longest time between two repetitions. If it is longer than `first_s`, waiting times are
            random, so that refused clients do not come back together.
    """

    def __init__(
        self,
        tell: Callable[[str], None] | None,
        seconds: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        first_s: float = 1.0,
        longest_s: float = 1.0,
    ) -> None:
        self._tell = tell
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._first_s = first_s
        self._longest_s = longest_s
        self._lock = threading.Lock()  # guards `_line_at`: several threads make requests
        self._line_at: float | None = None

    def ask(self, request: Callable[[], T], *, from_start: bool = False) -> T:
        """Return the result of `request`.

        Args:
            request: the request.
            from_start: count from now, not from the first failure, and begin no request after the time.

        Raises:
            BusyError: the request has failed for that long.
            StoreError: the request is refused, or the object is missing.
        """
        until = self._clock() + self._seconds if from_start else None
        backoff = Backoff(self._first_s, self._longest_s)
        while True:
            try:
                return request()
            except BusyError as error:
                current_time, wait_s = self._clock(), backoff.next()
                until = current_time + self._seconds if until is None else until
                if current_time >= until or (from_start and current_time + wait_s > until):
                    if self._tell is None:
                        raise
                    raise BusyError(f"{error} (it was asked for {self._seconds:g} s)") from None
                if self._tell is not None and self._is_line_due(current_time):
                    self._tell(f"{error}; it is asked again for {self._seconds:g} s (Ctrl-C ends that)")
            self._sleep(wait_s * random.uniform(0.5, 1) if self._longest_s > self._first_s else wait_s)

    def _is_line_due(self, current_time: float) -> bool:
        """Return whether no line was printed for as long as one request is repeated."""
        with self._lock:
            due = self._line_at is None or current_time - self._line_at >= self._seconds
            if due:
                self._line_at = current_time
            return due


def start(work: Callable[[], T], name: str) -> Future[T] | None:
    """Make a call in a new thread; None where no thread can be had."""
    future: Future[T] = Future()
    try:
        threading.Thread(target=_run, args=(future, work), name=name, daemon=True).start()
    except RuntimeError:
        return None
    return future


def begin(work: Callable[[], T], name: str) -> Future[T]:
    """Make a call in a new thread, or in the current thread where no other can be had."""
    future = start(work, name)
    if future is None:
        future = Future()
        _run(future, work)
    return future


def call(work: Callable[[], T]) -> T:
    """Return the result of a call; on the main thread Ctrl-C ends the wait for the result."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    finished: queue.SimpleQueue[None] = queue.SimpleQueue()
    future: Future[T] = Future()

    def run() -> None:
        _run(future, work)
        finished.put(None)

    if start(run, "ttp-request") is None:
        return work()
    finished.get()  # not `result`: Ctrl-C during the release of its lock would become another error
    return future.result()


def _run(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # the reader of the result gets the error
        future.set_exception(error)


class Threads:
    """A few threads that make calls in the order of `submit`; each starts when needed.

    Args:
        count: the largest number of threads.
        name: of each thread.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._started = 0
        # A call, and the function that cancels the call.
        self._calls: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], bool]] | None] = (
            queue.SimpleQueue()
        )

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Make a call in one of the threads, or in the current thread where no other can be had."""
        if self._started < self._count and start(self._serve, self._name) is not None:
            self._started += 1
        future: Future[T] = Future()
        if self._started:
            self._calls.put((partial(_run, future, work), future.cancel))
        else:
            _run(future, work)
        return future

    def close(self) -> None:
        """End each thread after its current call, and cancel the calls that have not begun."""
        try:
            while (queued_call := self._calls.get_nowait()) is not None:
                _, cancel = queued_call
                cancel()
        except queue.Empty:
            pass
        for _ in range(self._started):
            self._calls.put(None)

    def _serve(self) -> None:
        while (queued_call := self._calls.get()) is not None:
            run, _ = queued_call
            run()
            del queued_call, run  # they hold the result


def in_order(calls: Iterable[Callable[[], T]], name: str, at_once: int = AT_ONCE) -> Generator[Future[T]]:
    """Yield the results of calls in order, with a few calls running ahead.

    Closed, it begins no more calls, and waits for none.

    Args:
        calls: the calls.
        name: of the threads.
        at_once: the largest number of calls at the same time.
    """
    threads, waiting = Threads(at_once, name), deque[Future[T]]()
    try:
        for work in calls:
            waiting.append(threads.submit(work))
            if len(waiting) >= at_once:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        threads.close()
