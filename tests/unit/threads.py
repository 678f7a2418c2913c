"""Thread helpers: exceptions of threads are raised again, and a test can wait until a thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from adaptor.worker.door import Door
from tests.waiting import LONG_S as LONG_S  # tests import it from here, too


class Watched(threading.Condition):
    """A condition that reports when a thread has begun to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        # `super().wait` releases the lock only once this thread waits: the next owner finds a waiting thread.
        self.waiting.release()
        return super().wait(timeout)


def watched(door: Door) -> Watched:
    """Replace the door's condition by a `Watched`; call this before any thread waits at the door."""
    door._changed = Watched()
    return door._changed


def wait_for_waiter(changed: Watched, count: int = 1) -> None:
    """Return when `count` more threads wait, or were woken and wait again."""
    for _ in range(count):
        assert changed.waiting.acquire(timeout=LONG_S), "nobody waits"
    with changed:
        pass


class Thread:
    """`with Thread(f, x) as thread:` runs f(x); leaving the block joins it and raises its exception."""

    def __init__(self, act: Callable[..., Any], *args: Any) -> None:
        self._act, self._args = act, args
        self._error: BaseException | None = None
        self._result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._act(*self._args)
        except BaseException as error:
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(LONG_S)
        assert not self._thread.is_alive(), "the thread hangs"
        if self._error is not None:
            raise self._error
        return self._result

    def __enter__(self) -> Thread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.result()
