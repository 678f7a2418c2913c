"""Waits until the main thread of a survivor has left a broken collective and done its part, or hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

from adaptor.protocol.messages import Standing
from adaptor.worker import stacks
from adaptor.worker.abort_gloo import LOOK_S
from adaptor.worker.processor import CannotRejoinError, MainThreadHangsError

# When the connections of all groups are shut, what waits for them raises within milliseconds, and a wait for
# work that gloo has forgotten is ended within half a second (`abort_gloo.Waker`). A main thread that stands
# still for so long waits for others in a way that nothing here can end. On a machine with ten times more work
# than cores each of these takes seconds; and the step is on disk, so a longer wait costs only time.
UNWIND_S = 10.0


def until_it_comes(
    timeout_s: float,
    shut: Callable[[], int],
    is_done: Callable[[float], bool],
    is_gone: Callable[[], bool],
    *,
    look: Callable[[], Standing | None] = stacks.awaited,
) -> None:
    """Wait until the main thread has done its part; `is_done` waits for a given number of seconds at most.

    Args:
        timeout_s: seconds in total.
        shut: is called until then: a connection breaks whenever the main thread comes to use it.
        is_done: waits.
        is_gone: returns whether the script has left its training loop.
        look: returns the position of the main thread; None where the thread may stay for any time.

    Raises:
        MainThreadHangsError: the main thread waits for work that will not end.
        CannotRejoinError: the time is over, or the script has left the loop.
    """
    since = time.monotonic()
    until = since + timeout_s
    standing_before = look()
    while not is_done(max(0.0, min(LOOK_S, until - time.monotonic()))):
        time_now = time.monotonic()
        if time_now >= until:
            raise CannotRejoinError("its main thread has not left the training loop in time")
        if is_gone():
            raise CannotRejoinError("its script has left the training loop")
        shut()
        standing = look()
        if (
            standing is None
            or standing_before is None
            or standing.stack_hashes != standing_before.stack_hashes
        ):
            standing_before, since = standing, time_now
        elif time_now - since >= UNWIND_S:
            raise MainThreadHangsError(f"its main thread hangs in {standing.where}")
