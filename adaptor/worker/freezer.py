"""Freezes the state of a rank in an incident, and brings it to the step that is saved.

The processor's threads call it, wherever the main thread is; none of its waits is longer than it is told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from adaptor.devices.device import HOST, Device
from adaptor.protocol.board import Board
from adaptor.protocol.messages import BoardRecord, Phase
from adaptor.protocol.state_provider import Trainee
from adaptor.worker import interruption
from adaptor.worker.update_window import UpdateWindow


class Freezer:
    """The freezer of one rank.

    Args:
        board: of this rank.
        window: in which the main thread changes the state.
    """

    def __init__(self, board: Board, window: UpdateWindow) -> None:
        self.board = board
        self._window = window
        self._door = window.door
        self._trainee: Trainee | None = None
        self._ending = threading.Lock()  # while collectives are ended on the device
        # An incident is open, and the main thread has not put away what it has left half done.
        self._may_end = False
        self._may_interrupt = False  # the main thread may wait for them, and was not interrupted before

    @property
    def _device(self) -> Device:
        return HOST if self._trainee is None else self._trainee.device

    def begin(self, trainee: Trainee) -> None:
        """Begin with the state of `trainee`, which is whole."""
        self._trainee = trainee
        trainee.device.begin(self._end)

    def _end(self, act: Callable[[], None]) -> None:
        """End collectives on the device by `act` where that may be, and let the main thread leave them.

        With what nobody has reduced the main thread comes to no update, and skips none (`UpdateWindow.void`).
        One that is READY has no collective of this step on its way, and will be needed at the door.
        """
        with self._ending:
            board = self.board.record()
            if not (self._may_end and self._door.is_sealed) or board.phase is Phase.UPDATING:
                return
            is_ready = board.phase is Phase.READY
            self._window.void(board.ahead if is_ready else board.finished)
            if self._may_interrupt and not is_ready:
                self._may_interrupt = False
                interruption.interrupt(self._is_in_no_update)
            act()

    def _is_in_no_update(self) -> bool:
        return self._door.is_sealed and self.board.phase not in (Phase.READY, Phase.UPDATING)

    def begin_attempt(self) -> None:
        """Let collectives be ended once more: those of an attempt to go on that has failed may hang, too."""
        self._may_end = True

    def rest(self) -> None:
        """Return once all is done that the main thread, which has left the framework, has started there.

        From then on nothing is ended on the device in this attempt: what comes now is of fresh groups.
        """
        with self._ending:
            self._may_interrupt = False
        self._device.come_to_rest()
        with self._ending:
            self._may_end = False

    def freeze(self, timeout_s: float, is_repeated: bool = False) -> BoardRecord | None:
        """Close the door, and wait until no update is in flight.

        Args:
            timeout_s: seconds to wait.
            is_repeated: the order is repeated in the same incident: a dump may run, and is not disturbed.

        Returns:
            The board, or None if an update is still in flight after `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        if not (self._door.close(timeout_s) and self._updates_are_over(until)):
            return None
        if not is_repeated:
            self._may_end = self._may_interrupt = True
        board = self.board.record()
        uses_script_handlers = self._trainee is not None and not self._trainee.save
        # Handlers may keep the device busy for any time, which says nothing about the update.
        reason = (
            "" if is_repeated and uses_script_handlers else self._device.unreadable(release=not is_repeated)
        )
        return msgspec.structs.replace(board, phase=Phase.UNREADABLE, error=reason) if reason else board

    def bring_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> None:
        """Wait until this rank has the state of `step`, and keeps it.

        The update of the step is over then, if one is needed, and so is that of a later step which was let
        through before.

        Args:
            step: which the door has let through, or which is finished.
            wake: takes the main thread out of the barrier, in which it may still hang.
            timeout_s: seconds to wait.

        Raises:
            TimeoutError: the update was not done after `timeout_s`.
            RuntimeError: an exception left the update.
        """
        until = time.monotonic() + timeout_s

        def over() -> bool:
            return self.board.finished >= step or self.board.phase is not Phase.READY

        if self.board.finished < step:
            wake()
        if not (self._door.wait_until(over, timeout_s) and self._updates_are_over(until)):
            raise TimeoutError(f"the update of step {step} was not done after {timeout_s:g} s")
        if self.board.finished < step:
            raise RuntimeError(f"an exception ended the update of step {step}")

    def go_back(self, step: int) -> None:
        """Give up what was finished after `step`, before the live state is overwritten with the local copy.

        From now on nobody is told of a later step, or given its state; that of `step` is the local copy.
        """
        self.board.go_back(step)

    def _updates_are_over(self, until: float) -> bool:
        return self._window.wait_for_device(self._device, until)
