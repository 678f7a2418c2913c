"""The session of a worker whose steps the SDK follows.

The SDK's knowledge of a step, like the board's, must be true at every moment, because its thread may ask for
the state at any moment. So the board marks the live state as changing before the SDK hears of the beginning
of an update, and the board has finished a step before the SDK hears of its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from adaptor import hooks
from adaptor.devices.device import HOST
from adaptor.protocol.board import Board
from adaptor.protocol.state_provider import Trainee
from adaptor.worker.session import Session
from adaptor.worker.update_window import UpdateWindow


class SdkWindow(UpdateWindow):
    """The update window that is reported to the SDK, which stops ranks that may not begin an update.

    Attributes:
        sdk: the SDK's module, once training begins.
    """

    def __init__(self, board: Board, broke: Callable[[str], NoReturn]) -> None:
        super().__init__(board, broke)
        self.sdk: Any = None

    def close(self, step: int) -> None:
        self._board.finish(step)
        self.sdk.tft_end_updating_os(step)

    def _enter(self, trainee: Trainee, step: int) -> None:
        trainee.exchange()
        self._take_snapshot(trainee, step, updated=True)
        self._board.ready(step)
        if trainee.has_local_copy:
            self.sdk.tft_start_copy_os()
            self._copy_state(trainee)
        else:
            self._wait_at_the_barrier(trainee)
        self._board.updating(copied=trainee.has_local_copy)
        self.sdk.tft_start_updating_os(step - 1 if trainee.has_local_copy else -1)


class MindioSession(Session):
    """The `Session` in which the SDK replaces the door.

    Attributes:
        connect: loads the SDK, and registers this rank and its shards, on all ranks at the same time
        broke: called after the barrier broke, with the state of the step before; does not return
    """

    window: SdkWindow

    def __init__(
        self,
        board: Board,
        connect: Callable[[Trainee, int], None],
        broke: Callable[[str], NoReturn],
    ) -> None:
        super().__init__(board, connect, broke, hooks=hooks.of_worker(), window=SdkWindow(board, broke))

    def begin_training(self, trainee: Trainee, inner_optimizers: Iterable[object], origin: int) -> None:
        super().begin_training(trainee, inner_optimizers, origin)
        if origin:  # the SDK knows a step by the update that has made it
            self._tell_of_a_window(origin, finished_before=origin)

    def end_update(
        self, updated: bool, grad_norm: float | None, inner_optimizers: Iterable[object] = ()
    ) -> None:
        finished_before = self.board.finished
        super().end_update(updated, grad_norm, inner_optimizers)
        if not updated and self.board.finished > finished_before:
            self._tell_of_a_window(self.board.finished, finished_before=finished_before)

    def _tell_of_a_window(self, step: int, finished_before: int) -> None:
        """Report an update window without changes: the state is also the state of step `finished_before`."""
        assert self.trainee is not None
        self.window.sdk.tft_start_updating_os(finished_before if self.trainee.has_local_copy else -1)
        self.window.sdk.tft_end_updating_os(step)

    # the SDK's thread

    def is_in_the_copy(self, step: int) -> bool:
        """Return whether the state of `step`, which the SDK asks for, is in the local copy and not live."""
        return self.trainee is not None and self.trainee.has_local_copy and self.from_local_copy(step)

    def wait_for_the_device(self, timeout_s: float) -> None:
        """Wait until the main thread's started updates have ended on the device. Raises TimeoutError."""
        device = HOST if self.trainee is None else self.trainee.device
        if not self.window.wait_for_device(device, time.monotonic() + timeout_s):
            raise TimeoutError(f"the device was not done with an update after {timeout_s:g} s")
