"""Waits of the main thread for collectives, which `abort_collectives.Waker` ends from another thread.

gloo forgets work when its connection breaks: a send that is half written or refused by the kernel, and a
partly arrived message (pair.cc: `signalException` reports only queued work). A wait for forgotten work lasts
until the time-out of the group, half an hour, and torch cannot end the wait.

Invariant: in a wait of this module, the main thread is never longer than `SLICE_S` in torch's code without
checking for the end of the wait. The work is left behind with its thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from functools import partial
from typing import Any

from adaptor import threads
from adaptor.context import Context

# Work that is not done by then costs one more call: seldom enough to cost nothing, soon enough to be ended.
SLICE_S = 0.2
_SLICE = timedelta(seconds=SLICE_S)


class WaitEndedError(RuntimeError):
    """The wait was ended. Like gloo's own error, the error only follows from a fault."""

    def __init__(self) -> None:
        super().__init__("gloo has forgotten the work that was waited for, as its connections are broken")


class Wait:
    """One wait of the main thread."""

    _ended = False  # of the class: most are made and never asked

    def end(self) -> None:
        """Let the wait raise; from any thread."""
        self._ended = True

    def require_not_ended(self) -> None:
        """Raise after an end of the wait. Raises WaitEndedError: the wait was ended."""
        if self._ended:
            raise WaitEndedError


class Waits:
    """The waits of this process.

    Attributes:
        current: the main thread's present wait, if a wait of this module
        seconds: the main thread has spent in its waits, in all
    """

    def __init__(self, context: Context) -> None:
        self.current: Wait | None = None
        self.seconds = 0.0
        self._thread = threading.main_thread().ident

    def wait(self, work: Any, native: Callable[..., bool], *, message: bool = False) -> bool:
        """Wait for gloo work.

        Args:
            native: torch's own `wait` of the work.
            message: the work is a send or a receive, no collective.

        Returns:
            The result of `native`.

        Raises:
            WaitEndedError: another thread has ended the wait.
            RuntimeError: the work has failed.
        """
        if threading.get_ident() != self._thread:
            return native()
        wait = self.current = Wait()
        began = time.monotonic()
        try:
            return _in_a_thread(native, wait) if message else _in_slices(work, native, wait)
        finally:
            self.current = None
            self.seconds += time.monotonic() - began


def _in_slices(work: Any, native: Callable[..., bool], wait: Wait) -> bool:
    while True:
        has_ended, began = work.is_completed(), time.monotonic()
        try:
            return native(_SLICE)
        except RuntimeError:  # torch has no other name for a time that is over
            # What is made of other work (gloo's reduce-scatter) never says that it has ended.
            if has_ended or time.monotonic() - began < SLICE_S / 2:
                raise
        wait.require_not_ended()


def _in_a_thread(native: Callable[..., bool], wait: Wait) -> bool:
    """Wait for a message without a time-out, at which gloo would break all connections of the group."""
    answer: Future[bool] = Future()
    try:
        threads.reserve.run("ttp-wait", partial(threads.fulfil, answer, native))
    except RuntimeError:  # no thread can be had
        return native()
    while True:
        try:
            answer.exception(SLICE_S)
        except TimeoutError:
            wait.require_not_ended()
        else:
            return answer.result()
