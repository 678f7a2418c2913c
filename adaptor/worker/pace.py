"""Measures a worker's steps, and the phases between steps, and writes the measures to the board for the
agent.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypedDict, TypeVar

from adaptor import context
from adaptor.protocol.board import Board
from adaptor.protocol.messages import ComputeTime
from adaptor.waits import Waits

_T = TypeVar("_T")

# A step much longer than the longest of the last RECENT steps counts as a hang; so does a phase.
RECENT = 20
# The first steps of a process, in which kernels are compiled and memory is found, are no measure.
UNUSUAL = 2


class _Running(NamedTuple):
    """A phase that has not ended; see `Pace.begin_phase`."""

    name: str
    begun: float
    usual_s: float


class Measures(TypedDict):
    """The durations that were measured, in seconds: of the slowest of the first steps of a process, of recent
    steps, and of recent phases by their names."""

    first: float
    steps: list[float]
    phases: dict[str, list[float]]


class Pace:
    """Told by the main thread; phases may be in a step, and in each other."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._begun = 0.0
        self._took: deque[float] = deque(maxlen=RECENT)
        self._unusual = UNUSUAL
        self._computed = 0.0  # seconds of the forward and backward passes of the running step
        self._tokens = 0  # in the forward passes of the running step; 0: unknown
        self._compute_times: deque[ComputeTime] = deque(maxlen=RECENT)
        self._first = 0.0  # seconds of the slowest of the first steps of a process
        self._knows_first = False  # the duration came from another process
        self._in_phases = 0.0  # seconds of the running step
        self._waited = 0.0  # seconds for data, in all
        self._waited_before = 0.0  # the same, at the begin of the step
        self._running: list[_Running] = []
        self._since = 0.0  # from when on the innermost running phase has not been counted
        self._phases: dict[str, deque[float]] = {}
        self._rests = False

    def begin_step(self, step: int) -> None:
        self._begun = time.monotonic()
        self._in_phases = self._computed = 0.0
        self._tokens = 0
        self._waited_before = self._waited
        self._board.enter(step)

    def await_step(self, step: int) -> None:
        """Count this rank as in `step`: in an online recovery each rank waits for all others before it."""
        self._board.leave(self._slowest)
        self._board.enter(step)

    def end_step(self) -> None:
        """Does nothing where no step is running."""
        if self._board.inside < 0:
            return
        took = time.monotonic() - self._begun - self._in_phases
        self._board.spend("steps", max(0.0, took - (self._waited - self._waited_before)))
        if self._unusual:
            self._unusual -= 1
            self._first = max(self._first, took)
        else:
            self._took.append(took)
            of_token = self._computed / self._tokens if self._tokens else 0.0
            self._compute_times.append(ComputeTime(self._computed, of_token))
            of_steps, of_tokens = zip(*self._compute_times, strict=True)
            self._board.compute(ComputeTime(statistics.median(of_steps), statistics.median_low(of_tokens)))
        self._board.leave(self._slowest)

    def abandon_step(self) -> None:
        """Abandon the running step: its duration is no measure."""
        if self._board.inside >= 0:
            self._board.leave(self._slowest)

    @property
    def _slowest(self) -> float:
        first = self._first if self._unusual and self._knows_first else 0.0
        return max(first, max(self._took, default=0.0))

    def begin_phase(self, name: str, usual_s: float = 0.0) -> None:
        """Begin to measure the phase `name` between two steps.

        Args:
            usual_s: the seconds that a phase of this name takes, before the first has ended; 0: not known, so
                the first has no limit.
        """
        time_now = time.monotonic()
        if self._running:
            self._board.spend(self._running[-1].name, time_now - self._since)
        self._running.append(_Running(name, time_now, usual_s))
        self._since = time_now
        self._turn()

    def end_phase(self, *, is_measure: bool = True) -> None:
        """End the phase that was begun last.

        Args:
            is_measure: False: an exception has left the phase, perhaps because another rank hung.
        """
        ended_phase = self._running.pop()
        time_now = time.monotonic()
        took = time_now - ended_phase.begun
        if is_measure:
            self._board.spend(ended_phase.name, time_now - self._since)
            self._phases.setdefault(ended_phase.name, deque(maxlen=RECENT)).append(took)
        self._since = time_now
        if not self._running:
            self._in_phases += took
        self._turn()

    def compute(self, act: Callable[[], _T]) -> _T:
        """Call `act`, a forward or backward pass; waits for other ranks over gloo do not count."""
        waits = context.part(Waits)
        begun_at = time.monotonic() - waits.seconds
        result = act()
        self._computed += time.monotonic() - waits.seconds - begun_at
        return result

    def counting_tokens(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward`, with its tokens counted in the running step.

        Args:
            forward: returns its output first: losses of shape [batch, sequence], or activations of shape
                [sequence, batch, hidden] or logits of shape [batch, sequence, vocabulary]. The tokens of
                another output are unknown.
        """

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = forward(*args, **kwargs)
            shape: tuple[int, ...] = getattr(result[0] if isinstance(result, tuple) else result, "shape", ())
            if len(shape) in (2, 3):
                self._tokens += shape[0] * shape[1]
            return result

        return counted

    def wait_for_data(self, read: Callable[[], _T]) -> _T:
        """Call `read`, which waits for the next batch; in a phase the time belongs to the phase."""
        if self._running:
            return read()
        begun_at = time.monotonic()
        batch = read()
        took = time.monotonic() - begun_at
        self._board.spend("data", took)
        self._waited += took
        return batch

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Count the time in which a checkpoint is loaded, before training begins."""
        begun_at = time.monotonic()
        yield
        self._board.spend("load", time.monotonic() - begun_at)

    def measures(self) -> Measures:
        """Return the durations of steps and phases, for a process that takes the place of another."""
        return {
            "first": 0.0 if self._unusual and not self._knows_first else self._first,
            "steps": list(self._took),
            "phases": {name: list(took) for name, took in self._phases.items()},
        }

    def take_over(self, measures: Measures) -> None:
        """Start with the measures of another process: otherwise the limits of the first steps would be 15
        times as long, and the first phase of each kind would have none.
        """
        self._first = measures["first"]
        self._knows_first = self._first > 0.0
        if self._knows_first:
            self._took.extend(measures["steps"])
        for name, took in measures["phases"].items():
            self._phases[name] = deque(took, maxlen=RECENT)
        self._board.leave(self._slowest)

    def begin(self) -> None:
        """Training begins, for the first time or again after `rest`."""
        self._rests = False

    def rest(self) -> None:
        """Training is over: the durations of the loop say nothing about later phases."""
        self._rests = True

    def _turn(self) -> None:
        if not self._running:
            self._board.turn(-1.0)
            return
        phase = self._running[-1]
        earlier = self._phases.get(phase.name, ()) if not self._rests else ()
        self._board.turn(max(earlier, default=phase.usual_s))
