"""The signals with which somebody ends a job: the first one saves it, the second one ends it at once.

What comes after the second is ignored, and so is what comes so soon after the first that it is the same
request. torch's handlers raise an exception wherever the main thread is. Where that loses it (a log handler
and a destructor drop what they cannot handle), the agent raises it again when it looks at its workers.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from adaptor.protocol.environment import ending_signals

# These may come twice for one request. At a time limit Slurm's daemons and its srun send SIGTERM, some
# hundredths of a second apart. When a terminal is closed its shell sends SIGHUP, and at the end of that shell
# the kernel does; systemd sends SIGHUP after SIGTERM. A person who asks again has waited longer, or presses
# Ctrl-C.
SAME_REQUEST_S = 5.0
_SENT_TWICE = {signal.SIGTERM, signal.SIGHUP}
# A signal that the agent has not taken within this time was lost on its way to it, and the next one counts.
# torch writes a log line in between.
TAKEN_S = 1.0


class EndRequests:
    """Handlers before others, which raise what ends the job.

    Args:
        clock: seconds, which only go forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._first: tuple[int, float] | None = None  # its number, and when it came
        self._taken = False
        self._has_ended = False  # by the second one

    def install(self) -> None:
        """Stand before the handlers that are set now; signals that are ignored stay so."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in ending_signals():
            handler = signal.getsignal(number)
            if callable(handler) and handler != self.hear:
                self._handlers[number] = handler
                signal.signal(number, self.hear)

    def hear(self, number: int, frame: FrameType | None) -> None:
        """Take a signal: call the handler before which this one stands, or ignore it."""
        if self._has_ended or self._is_the_same(number):
            return
        if self._taken:
            self._has_ended = True
        else:
            self._first = number, self._clock()
        self._call(number, frame)

    def take(self) -> None:
        """Note that the agent has begun to do what the first one asks for: the next one is the second."""
        self._taken = True

    def raise_again(self) -> None:
        """Call the handler of the first signal again, if what it raised was lost before it was taken."""
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
