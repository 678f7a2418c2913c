"""Requests in threads for which the end of the process does not wait.

A client waits for an answer in a function that no Python signal handler interrupts, for minutes where the
store is silent, and the threads of `concurrent.futures` are joined at the end of a process. So a request of
the main thread is made in another thread, and all of these are daemons: Ctrl-C and an error end at once.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

T = TypeVar("T")
# A call that is to be made, and how it is cancelled.
_Given = tuple[Callable[[], None], Callable[[], bool]]


def begin(call: Callable[[], T], name: str) -> Future[T]:
    """Make a call in a thread of its own; in this one where no other can be had.

    Args:
        call: what it does.
        name: of the thread.
    """
    future: Future[T] = Future()
    if not _start(lambda: _run(future, call), name):
        _run(future, call)
    return future


def call(work: Callable[[], T]) -> T:
    """Return the result of a call; on the main thread Ctrl-C ends the wait for it."""
    if threading.current_thread() is not threading.main_thread():
        return work()
    finished: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
    future: Future[T] = Future()

    def run() -> None:
        _run(future, work)
        finished.put(future)

    if not _start(run, "ttp-request"):
        return work()
    # Not `result`: Ctrl-C while it gives its lock back would become another error (`ctrl_c.py`).
    return finished.get().result()


class Threads:
    """A few threads that make calls in the order in which they were given; they start when needed.

    Args:
        count: of them, at most.
        name: of each.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._begun = 0
        self._calls: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Let a thread make the call; this one does where none can be had."""
        future: Future[T] = Future()
        if self._begun < self._count and _start(self._serve, self._name):
            self._begun += 1
        if self._begun:
            self._calls.put((partial(_run, future, work), future.cancel))
        else:
            _run(future, work)
        return future

    def close(self) -> None:
        """Let each thread end after the call that it makes now; the others are cancelled."""
        try:
            while (queued_call := self._calls.get_nowait()) is not None:
                _, cancel = queued_call
                cancel()
        except queue.Empty:
            pass
        for _ in range(self._begun):
            self._calls.put(None)

    def _serve(self) -> None:
        while (queued_call := self._calls.get()) is not None:
            run, _ = queued_call
            run()
            del queued_call, run  # they hold the result


def _start(work: Callable[[], None], name: str) -> bool:
    """Start a thread; return False where none can be had."""
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    except RuntimeError:
        return False
    return True


def _run(future: Future[T], work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # whoever asks for the result gets it
        future.set_exception(error)
