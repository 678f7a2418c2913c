"""Freezes the state of a rank in an incident, and brings the state to the step to save.

The processor's threads call the freezer, wherever the main thread is; no wait exceeds its time-out.
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
from adaptor.worker import abort_collectives
from adaptor.worker.update_window import UpdateWindow


class Freezer:
    """The freezer of one rank."""

    def __init__(self, board: Board, window: UpdateWindow) -> None:
        self.board = board
        self._window = window
        self._door = window.door
        self._trainee: Trainee | None = None
        self._ending = threading.Lock()  # while collectives are ended on the device
        # An incident is open, and the main thread has not cleared its unfinished work.
        self._may_end = False
        self._may_interrupt = (
            False  # the main thread may wait for collectives, and was not interrupted before
        )

    @property
    def _device(self) -> Device:
        return HOST if self._trainee is None else self._trainee.device

    def begin(self, trainee: Trainee) -> None:
        """Begin with the state of `trainee`, which is whole."""
        self._trainee = trainee
        trainee.device.begin(self._end)

    def _end(self, act: Callable[[], None]) -> None:
        """End collectives on the device by `act` where allowed, and let the main thread leave them.

        With unreduced numbers the main thread comes to no update, and skips none (`UpdateWindow.void`). A
        main thread that is READY has no collective of this step in flight, and will be needed at the door.
        """
        with self._ending:
            board = self.board.record()
            if not (self._may_end and self._door.is_sealed) or board.phase is Phase.UPDATING:
                return
            is_ready = board.phase is Phase.READY
            self._window.void(board.ahead if is_ready else board.finished)
            if self._may_interrupt and not is_ready:
                self._may_interrupt = False
                abort_collectives.interrupt(self._is_in_no_update)
            act()

    def _is_in_no_update(self) -> bool:
        return self._door.is_sealed and self.board.phase not in (Phase.READY, Phase.UPDATING)

    def begin_attempt(self) -> None:
        """Let collectives be ended once more: collectives of a failed attempt to go on may hang, too."""
        self._may_end = True

    def rest(self) -> None:
        """Return once all work is done that the main thread started on the device before leaving the
        framework.

        From then on nothing is ended on the device in this attempt: later collectives belong to fresh groups.
        """
        with self._ending:
            self._may_interrupt = False
        self._device.come_to_rest()
        with self._ending:
            self._may_end = False

    def freeze(self, timeout_s: float, is_repeated: bool = False) -> BoardRecord | None:
        """Close the door, and wait until no update is in flight.

        Args:
            is_repeated: the order is repeated in the same incident: a dump may run, and is not disturbed.

        Returns:
            The board, or None if an update is still in flight after `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        # The thread of a repeated order may begin when all go on already: it closes nothing.
        is_still = (
            self._door.wait_until(lambda: True, timeout_s) if is_repeated else self._door.close(timeout_s)
        )
        if not (is_still and self._updates_are_over(until)):
            return None
        if not is_repeated:
            self._may_end = self._may_interrupt = True
        board = self.board.record()
        uses_script_handlers = self._trainee is not None and not self._trainee.save_folder
        # Handlers may keep the device busy for any time, unrelated to the update.
        reason = (
            "" if is_repeated and uses_script_handlers else self._device.unreadable(release=not is_repeated)
        )
        return msgspec.structs.replace(board, phase=Phase.UNREADABLE, error=reason) if reason else board

    def bring_to(self, step: int, wake: Callable[[], int], timeout_s: float) -> None:
        """Wait until this rank has, and keeps, the state of `step`.

        The update of the step is over then, if needed, and so is the update of a later step let through
        before.

        Args:
            step: the step that the door has let through, or a finished step.
            wake: takes the main thread out of the barrier, where the thread may still hang.

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
        """Discard the record of steps finished after `step`, before the live state is overwritten with the
        local copy.

        From now on no later step is reported, and no state of a later step is handed out; the state of `step`
        is the local copy.
        """
        self.board.go_back(step)

    def _updates_are_over(self, until: float) -> bool:
        return self._window.wait_for_device(self._device, until)
