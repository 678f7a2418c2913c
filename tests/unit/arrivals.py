"""Event-loop helpers of tests: wait for a condition and check it again after each change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from adaptor.launchers.control.agent_connections import RejectedConnections
from tests.unit.threads import LONG_S

T = TypeVar("T")


class Changes:
    """Wakes coroutines of one event loop that wait for a condition, after each change."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` holds; check it after each change. Raises TimeoutError after LONG_S."""

        async def wait() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        await asyncio.wait_for(wait(), LONG_S)


class Calls(Changes):
    """Counts the calls of a method of an object, and tells of each when it has returned."""

    def __init__(self, owner: object, method: str) -> None:
        super().__init__()
        self.counted = 0
        act = getattr(owner, method)

        def call(*args: object, **named: object) -> object:
            result = act(*args, **named)
            self.counted += 1
            self.tell()
            return result

        setattr(owner, method, call)


class Arrivals(list[T], Generic[T]):
    def __init__(self) -> None:
        super().__init__()
        self.changes = Changes()

    def append(self, item: T) -> None:
        super().append(item)
        self.changes.tell()

    def extend(self, items: Iterable[T]) -> None:
        super().extend(items)
        self.changes.tell()


class Rejected(RejectedConnections):
    """Tells of each connection that is counted."""

    def __init__(self, place: str) -> None:
        super().__init__(place)
        self.changes = Changes()

    def count(self, reason: str) -> None:
        super().count(reason)
        self.changes.tell()
