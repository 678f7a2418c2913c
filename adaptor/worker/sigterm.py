"""Turns SIGTERM to a worker into a report, instead of its end.

Invariant: SIGTERM does not end a worker, unless its script has set a handler of its own, which it keeps;
children still end by it. The process may be a holder, and a scheduler that signals all processes would end
all holders. The main thread may hang, where no Python handler runs; so the byte counts that the interpreter
writes into a pipe at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType


class SigtermReports:
    """The handler of SIGTERM in this process.

    Args:
        report: tells the agent, from any thread; a second report has no effect.
        wake_writer: the pipe into which the interpreter writes the numbers of signals.
    """

    def __init__(self, report: Callable[[], None], wake_writer: int) -> None:
        self._report = report
        self._wake_writer = wake_writer

    def install(self) -> None:
        """Take SIGTERM; call it on the main thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.siginterrupt(signal.SIGTERM, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # A signal to a child waits until the child has set its own handler.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM}),
            after_in_child=self._give_back_in_child,
        )

    def hear(self, numbers: bytes) -> None:
        """Report SIGTERM if it is among `numbers`, which were read from the pipe."""
        if signal.SIGTERM in numbers and self._is_installed:
            self._report()

    @property
    def _is_installed(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._on_sigterm

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Report SIGTERM if a script has taken the pipe away."""
        self._report()

    def _give_back_in_child(self) -> None:
        if self._is_installed:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
