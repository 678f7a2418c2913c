"""Requests that run ahead of whoever uses what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import TypeVar

from adaptor.store.client import AT_ONCE
from adaptor.store.threads import Threads

T = TypeVar("T")


def in_order(calls: Iterable[Callable[[], T]], name: str, at_once: int = AT_ONCE) -> Generator[Future[T]]:
    """Yield the results of calls in order, with a few calls running ahead.

    Closed, it begins no more of them, and waits for none.

    Args:
        calls: what is done.
        name: of the threads that do it.
        at_once: how many at the same time, at most.
    """
    threads, waiting = Threads(at_once, name), deque[Future[T]]()
    try:
        for call in calls:
            waiting.append(threads.submit(call))
            if len(waiting) >= at_once:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        threads.close()
