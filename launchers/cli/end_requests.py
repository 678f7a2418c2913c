"""The signals that end a job: the first signal saves the job, the second ends the job at once.

Signals after the second are ignored, as is a signal shortly after the first that repeats the same request.
torch's handlers raise an exception in the main thread. If the exception is lost (log handlers and
destructors drop exceptions), the agent raises it again when it looks at its workers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from adaptor.protocol.environment import ending_signals

# SIGTERM and SIGHUP may come twice for one request. At a time limit Slurm's daemons and srun send SIGTERM,
# some hundredths of a second apart. When a terminal closes, its shell sends SIGHUP, and the kernel again at
# the end of the shell; systemd sends SIGHUP after SIGTERM. A person who asks again waits longer, or presses
# Ctrl-C.
SAME_REQUEST_S = 5.0
_SENT_TWICE = {signal.SIGTERM, signal.SIGHUP}
# A signal that the agent has not taken within this time was lost, and the next signal counts. torch writes a
# log line in between.
TAKEN_S = 1.0


class EndRequests:
    """Signal handlers that call torch's handlers, which raise the exception that ends the job.

    Args:
        clock: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._first: tuple[int, float] | None = None  # number and time of the first signal
        self._taken = False
        self._has_ended = False  # by the second signal

    def install(self) -> None:
        """Wrap the current handlers; ignored signals stay ignored."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ending_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler != self.hear:
                self._handlers[number] = handler
                signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: call the wrapped handler, or ignore the signal."""
        if self._has_ended or self._is_the_same(number):
            return
        if self._taken:
            self._has_ended = True
        else:
            self._first = number, self._clock()
        self._call(number, frame)

    def take(self) -> None:
        """Note that the agent has begun to serve the first signal: the next signal is the second."""
        self._taken = True

    def raise_again(self) -> None:
        """Call the handler of the first signal again, if its exception was lost."""
        if self._first is not None and not self._taken:
            self._call(self._first[0], None)

    def _is_the_same(self, number: int) -> bool:
        if self._first is None:
            return False
        first, at = self._first
        since = self._clock() - at
        if {first, number} <= _SENT_TWICE:
            return since < SAME_REQUEST_S
        return not self._taken and since < TAKEN_S

    def _call(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number)
        if handler is not None:
            handler(number, frame)
