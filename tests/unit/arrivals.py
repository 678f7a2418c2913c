"""What comes to a test in its event loop, and a wait for it that is woken by each arrival."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from adaptor.launchers.control.agent_connections import RejectedConnections
from tests.unit.threads import LONG_S

T = TypeVar("T")


class Changes:
    """Wakes who waits for a condition whenever something has changed; for one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    def tell(self) -> None:
        self._changed.set()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until `done()`, which is asked after each change; TimeoutError where it never is."""

        async def wait() -> None:
            while not done():
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

    def append(self, one: T) -> None:
        super().append(one)
        self.changes.tell()

    def extend(self, more: Iterable[T]) -> None:
        super().extend(more)
        self.changes.tell()


class Rejected(RejectedConnections):
    """Tells of each connection that is counted."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.changes = Changes()

    def count(self, what: str) -> None:
        super().count(what)
        self.changes.tell()
