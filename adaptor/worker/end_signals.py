"""Turns the signals that end a job into a report of the worker instead of the worker's end.

Invariant: no signal that `ttprun` handles (SIGTERM, and the signals of --signals-to-handle) ends a worker,
unless the script has set its own handler, which stays, or the signal is ignored; the signals still end
children. The process may be a holder, and a scheduler that signals all processes would end all holders. The
main thread may hang, where no Python handler runs; so the adaptor reads the byte that the interpreter writes
into a pipe at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from adaptor.protocol.environment import ending_signals


class EndSignals:
    """The handlers of the signals that end a job, in this process.

    Args:
        report: tells the agent the name of a signal, from any thread; a second report has no effect.
        wake_writer: the pipe into which the interpreter writes signal numbers.
    """

    def __init__(self, report: Callable[[str], None], wake_writer: int) -> None:
        self._report = report
        self._wake_writer = wake_writer
        self._handlers: dict[signal.Signals, object] = {}  # the handlers of children

    def install(self) -> None:
        """Take the signals; call on the main thread."""
        for number in ending_signals():
            handler = signal.getsignal(number)
            if handler is signal.SIG_IGN:
                continue
            self._handlers[number] = handler
            signal.signal(number, self._on_signal)
            signal.siginterrupt(number, False)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        taken = self._handlers.keys()
        # A signal to a child waits until the child has set its own handler.
        os.register_at_fork(
            before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, taken),
            after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, taken),
            after_in_child=self._give_back_in_child,
        )

    def hear(self, numbers: bytes) -> None:
        """Report the signals among `numbers`, which were read from the pipe."""
        for number in self._handlers:
            if number in numbers and self._is_taken(number):
                self._report(number.name)

    def _is_taken(self, number: signal.Signals) -> bool:
        return signal.getsignal(number) == self._on_signal

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Report a signal if a script has taken the pipe away."""
        self._report(signal.Signals(number).name)

    def _give_back_in_child(self) -> None:
        for number, handler in self._handlers.items():
            if self._is_taken(number):
                signal.set_wakeup_fd(-1)
                signal.signal(number, handler)  # type: ignore[arg-type]  # what getsignal has returned
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._handlers.keys())
