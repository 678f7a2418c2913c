"""SIGTERM that comes twice within a moment is one request to end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

# A scheduler tells a job more than once that it is to end: at a time limit Slurm's daemons and its srun send
# SIGTERM, some hundredths of a second apart. A person who repeats it has waited longer, or presses Ctrl-C.
SAME_REQUEST_S = 5.0


class OneRequest:
    """A handler of SIGTERM before another: what comes soon after the first is the same request.

    Args:
        clock: seconds, which only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._handler: Callable[[int, FrameType | None], object] | None = None

    def install(self) -> None:
        """Stand before the handler that is set now; signals that are ignored stay so."""
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            if handler != self.hear:
                self._handler = handler
            signal.signal(signal.SIGTERM, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Take a signal; one that comes again within SAME_REQUEST_S seconds is the same request."""
        now = self._clock()
        if self._first is not None and now - self._first < SAME_REQUEST_S:
            return
        self._first = now
        if self._handler is not None:
            self._handler(number, frame)
