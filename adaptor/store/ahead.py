"""Requests that run ahead of whoever uses what they bring."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from adaptor.store.client import AT_ONCE

T = TypeVar("T")


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
