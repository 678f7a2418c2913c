"""Requests that run ahead of whoever uses what they bring."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from adaptor.store.client import AT_ONCE

T = TypeVar("T")


def begin(call: Callable[[], T], name: str) -> Future[T]:
    """Make a call in a thread of its own, for which the end of the process does not wait.

    That of a pool would keep Ctrl-C waiting for as long as a request takes that the store does not answer.

    Args:
        call: what it does.
        name: of the thread.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # whoever asks for the result gets it
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return made


def in_order(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]]) -> Generator[Future[T]]:
    """Yield the results of calls in order, with a few calls running ahead; closed, it cancels these."""
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) >= AT_ONCE:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for one in waiting:
            one.cancel()
