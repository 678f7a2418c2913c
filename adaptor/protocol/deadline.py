"""A deadline for part of a coroutine."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from types import TracebackType


def deadline(seconds: float) -> AbstractAsyncContextManager[object]:
    """Return `asyncio.timeout` (3.11 and later), or an equivalent on 3.10; raises asyncio.TimeoutError."""
    if hasattr(asyncio, "timeout"):
        timer: AbstractAsyncContextManager[object] = asyncio.timeout(seconds)
        return timer
    return _Deadline(seconds)


class _Deadline:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None

        def expire() -> None:
            self._expired = True
            task.cancel()

        self._handle = asyncio.get_running_loop().call_later(self._seconds, expire)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._expired and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError
