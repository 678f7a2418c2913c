"""Simulated time, connections, and code that waits.

Blocking real code is parked: its condition variable raises `Parked`, and the code is called again from its
beginning after a change. Therefore a call must be repeatable up to its wait, which holds for all waits of the
session and the door (`Session.before_update`, `freeze`, `bring_to`; `Door.enter`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class Clock:
    """Planned events, ordered by time and then by the order of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._planned = 0

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        self._planned += 1
        heapq.heappush(self._plans, (time, self._planned, act, args))

    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        self._planned += 1
        heapq.heappush(self._plans, (self.now + seconds, self._planned, act, args))

    def step(self) -> bool:
        """Let the next event happen; return False if there is none."""
        if not self._plans:
            return False
        self.now, _, act, args = heapq.heappop(self._plans)
        act(*args)
        return True


class Link:
    """One direction of a connection: delivers messages in order, each after a delay, until cut."""

    def __init__(self, clock: Clock, delay: Callable[[], float], arrive: Callable[[Any], None]) -> None:
        self._clock = clock
        self._delay = delay
        self._arrive = arrive
        self._last = 0.0
        self._open = True

    def send(self, message: Any) -> None:
        self._last = max(self._last, self._clock.now + self._delay())
        self._clock.at(self._last, self._deliver, message)

    def stall(self, seconds: float) -> None:
        """Deliver nothing for some seconds: packets are lost and sent again."""
        self._last = max(self._last, self._clock.now + seconds)

    def cut(self) -> None:
        """Deliver nothing any more, not even messages on their way."""
        self._open = False

    def _deliver(self, message: Any) -> None:
        if self._open:
            self._arrive(message)


class Parked(BaseException):
    """Raised where code would wait, for at most `timeout_s`; `except Exception` does not catch it."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self.timeout_s = timeout_s


class Condition:
    """Stands in for the `threading.Condition` of a real door; `changed` continues parked threads.

    Attributes:
        expired: whether the caller's time is over.
        again: whether the caller repeats earlier calls, which change nothing.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.expired = False
        self.again = False
        self._changed = changed

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def notify_all(self) -> None:
        if not self.again:
            self._changed()

    def wait(self) -> None:
        raise Parked

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        if not condition() and not self.expired:
            raise Parked(timeout_s)
        return condition()


# What a simulated thread waits for: a number of seconds, or None: until something changes.
Wait = float | None
Body = Generator[Wait, None, T]


class Pause:
    """What a coroutine awaits in the simulation: a number of seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


class Process:
    """A process with threads that can be stopped, continued and ended: a worker or an agent."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.alive = True
        self.stopped = False
        self.condition = Condition(self.changed)
        self._parked: list[Body[None]] = []
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def later(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Call `act` in the process after some seconds: only if the process is alive, and once it is not
        stopped.
        """
        self.clock.after(seconds, self.do, act, *args)

    def do(self, act: Callable[..., None], *args: Any) -> None:
        if self.stopped:
            self._held.append((act, args))
        elif self.alive:
            act(*args)

    def go_on(self) -> None:
        self.stopped = False
        waiting, self._held = self._held, []
        for act, args in waiting:
            self.do(act, *args)

    def thread(self, body: Body[None]) -> None:
        try:
            wait = next(body, -1.0)
        except Parked:
            raise AssertionError("something waits that nothing would wake") from None
        if wait is None:
            self._parked.append(body)
        elif wait >= 0:
            self.later(wait, self.thread, body)

    def changed(self) -> None:
        parked, self._parked = self._parked, []
        for body in parked:
            self.later(0.0, self.thread, body)

    def through(self, act: Callable[[], T]) -> Body[T]:
        """Call `act` repeatedly until it no longer waits, or its time is over."""
        deadline: float | None = None
        repeated = False
        while True:
            self.condition.expired = deadline is not None and self.clock.now >= deadline
            self.condition.again = repeated
            try:
                return act()
            except Parked as parked:
                if deadline is None and parked.timeout_s is not None:
                    deadline = self.clock.now + parked.timeout_s
                    self.later(parked.timeout_s, self.changed)
            finally:
                self.condition.again = False
            repeated = True
            yield None
