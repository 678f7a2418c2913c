"""Makes Ctrl-C end a command that runs until it comes, such as `ttp serve`.

Python raises KeyboardInterrupt wherever the main thread is. In a destructor or a callback it is dropped, and
while a lock is being given back (`threading.Condition`) another error takes its place: the command would go
on.

Invariant: a Ctrl-C that was lost is raised again in the command's next round.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class CtrlC:
    """Hears Ctrl-C, as a context; where it is ignored, as in the background of a shell, it stays so."""

    def __init__(self) -> None:
        self._has_come = False
        self._is_heard = False

    def raise_again(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C has come; call it in each round of the command."""
        if self._has_come:
            raise KeyboardInterrupt

    def __enter__(self) -> CtrlC:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._hear)
            self._is_heard = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        raise KeyboardInterrupt
