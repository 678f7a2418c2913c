"""The door: the only way into a window in which a rank changes the state that could be saved.

There are three kinds of windows: an update of the optimizer, named by its step, the publishing of a regular
checkpoint, and a move of the state to other memory. Invariants:

1. While the door is closed no window opens, except the window of the step that the controller lets pass,
   until the controller lets another step pass.
2. `close` returns only when no window is open: work inside a window is local and ends by itself.
3. No lock is held while a window is open, so nothing here waits for the framework.

In an online recovery the main thread is turned away: the main thread leaves the framework by an exception,
and the door is opened again when all ranks go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

# The names of the other windows, where an update has its step.
PUBLISH = -1
MOVE = -2


class Unwind(BaseException):
    """Takes the main thread out of the framework's training loop; no failure, and no `Exception`, which a
    framework may catch."""


class Door:
    """Opened and closed by the processor, passed by the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.closed = False
        self._inside = 0
        self._let_through: int | None = None
        self._turns_away = False

    @property
    def is_sealed(self) -> bool:
        """Return whether the door is closed, and no window is open."""
        return self.closed and not self._inside

    def enter(self, window: int) -> None:
        """Open a window; waits while the door is closed, until the controller lets this window pass.

        Raises:
            Unwind: everybody is turned away.
        """
        with self._changed:
            while self.closed and (self._turns_away or self._let_through != window):
                if self._turns_away:
                    raise Unwind
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Close, then wait for an open window to end; False: the window has not ended after `timeout_s`."""
        with self._changed:
            self.closed = True
            return self._changed.wait_for(lambda: self._inside == 0, timeout_s)

    def shut(self) -> None:
        """Close without waiting: for the main thread itself, which is not inside."""
        with self._changed:
            self.closed = True

    def let_through(self, step: int | None) -> None:
        """Let the window of `step` open, and no other; None: none."""
        with self._changed:
            self._let_through = step
            self._changed.notify_all()

    def turn_away(self) -> None:
        """Let a thread that waits at the closed door, or comes to the door, leave the framework."""
        with self._changed:
            self._turns_away = True
            self._changed.notify_all()

    def require_not_turned_away(self) -> None:
        """Let the main thread leave the framework where everybody is turned away.

        Raises:
            Unwind: everybody is.
        """
        if self._turns_away:
            raise Unwind

    def open(self) -> None:
        """Let every window open again: the incident is over, and this process goes on."""
        with self._changed:
            self.closed = self._turns_away = False
            self._let_through = None
            self._changed.notify_all()

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until no window is open and `is_done()` is true; checked again whenever a window ends."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0 and is_done(), timeout_s)
