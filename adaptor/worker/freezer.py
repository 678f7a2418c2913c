"""Freezes the state of a rank in an incident, and brings it to the step that is saved.

The processor's threads call it, wherever the main thread is; none of its waits is longer than it is told.
"""

from __future__ import annotations

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
        self._last_believed: BoardRecord | None = None
        self._has_interrupted = False  # the main thread, in this incident

    @property
    def _device(self) -> Device:
        return HOST if self._trainee is None else self._trainee.device

    def begin(self, trainee: Trainee) -> None:
        """Begin with the state of `trainee`, which is whole."""
        self._trainee = trainee
        self._last_believed = None
        self._has_interrupted = False
        trainee.device.begin(self._may_release)

    def _may_release(self) -> bool:
        """Return whether collectives on the device may be ended, and let the main thread leave them.

        A rank that is not READY may be so afterwards, with gradients that nobody has reduced, or may skip a
        step: only what it says of itself now is believed. One that is READY has no collective on its way.
        """
        if not self._door.closed:
            return False
        board = self.board.record()
        if self._last_believed is None and board.phase is not Phase.READY:
            self._last_believed = board
        if not self._has_interrupted:
            self._has_interrupted = True
            interruption.interrupt()
        return True

    def freeze(self, timeout_s: float, again: bool = False) -> BoardRecord | None:
        """Close the door, and wait until no update is in flight.

        Args:
            timeout_s: seconds to wait.
            again: the order is repeated in the same incident: a dump may run, and is not disturbed.

        Returns:
            The board, or None if an update is still in flight after `timeout_s`.
        """
        until = time.monotonic() + timeout_s
        if not (self._door.close(timeout_s) and self._updates_are_over(until)):
            return None
        board = self._last_believed or self.board.record()
        uses_script_handlers = self._trainee is not None and not self._trainee.save
        # Handlers may keep the device busy for any time, which says nothing about the update.
        why = "" if again and uses_script_handlers else self._device.unreadable(release=not again)
        return msgspec.structs.replace(board, phase=Phase.UNREADABLE, error=why) if why else board

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
            raise RuntimeError(f"an exception left the update of step {step}")

    def go_back(self, step: int) -> None:
        """Give up what was finished after `step`, before the live state is overwritten with the local copy.

        From now on nobody is told of a later step, or given its state; that of `step` is the local copy.
        """
        self._last_believed = None
        self.board.go_back(step)

    def _updates_are_over(self, until: float) -> bool:
        return self._window.wait_for_device(self._device, until)
