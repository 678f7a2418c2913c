"""Asks a store again that is busy or does not answer: it may be about to start."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from adaptor.errors import StoreError

# A server of a store that is started again, or gives way to another one, is back within a minute as a rule;
# a wrong address is said when it is asked for the first time, some seconds after the start.
RETRY_S = 60.0
_AGAIN_S = 1.0

T = TypeVar("T")


class BusyError(StoreError):
    """The store does not answer, or says that it cannot now; it may a little later."""


class Retrying:
    """Makes requests again for a minute, which a line says.

    The client does so by itself, but ten times at most, and that takes some four seconds where a port is
    closed.

    Args:
        tell: prints a line.
        seconds: for which a request is made again, from its first failure.
        clock: in seconds.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        tell: Callable[[str], None],
        seconds: float = RETRY_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._tell = tell
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()  # of what follows; requests are made in several threads
        self._told_at: float | None = None

    def ask(self, request: Callable[[], T]) -> T:
        """Return what `request` brings.

        Raises:
            BusyError: it has failed for that long.
            StoreError: it is refused, or there is no such object.
        """
        until: float | None = None
        while True:
            try:
                return request()
            except BusyError as error:
                current_time = self._clock()
                until = current_time + self._seconds if until is None else until
                if current_time >= until:
                    raise BusyError(f"{error} (it was asked for {self._seconds:g} s)") from None
                if self._is_to_be_told(current_time):
                    self._tell(f"{error}; it is asked again for {self._seconds:g} s (Ctrl-C ends that)")
            self._sleep(_AGAIN_S)

    def _is_to_be_told(self, current_time: float) -> bool:
        """Return whether no line has said so for as long as one request is made again."""
        with self._lock:
            due = self._told_at is None or current_time - self._told_at >= self._seconds
            if due:
                self._told_at = current_time
            return due
