"""The tail of a step (an evaluation, a regular save): whether it is to be made again, and from where.

A rank that has begun the next step has done it. Where one has not, all do it again, with what was consumed
before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from adaptor.online.replay import STEPS, Replay
from adaptor.worker.processor import CannotRejoinError


class Behind(NamedTuple):
    """The data with which a newcomer joins at a step.

    Attributes:
        before: what was consumed before it; empty: it was not begun in the process that tells
        read: how often each iterator of validation data was read behind it
    """

    step: int
    before: dict[str, int]
    read: list[int]


class StepTail:
    """The knowledge of one rank about the tail of its step.

    Args:
        valid: its validation data, in the order of the framework's iterators.
        told: in a newcomer, what its twin knows.
    """

    def __init__(self, valid: Sequence[Replay], told: Behind | None) -> None:
        self._valid = valid
        self._told = told
        self._begun = 0  # the newest step
        self._before: dict[int, dict[str, int]] = {}  # what was consumed before the last steps, by step
        self._left: int | None = None  # the step behind which something is to be done

    @property
    def is_left(self) -> bool:
        """Return whether something behind the step is to be done."""
        return self._left is not None

    def take(self) -> int | None:
        """Return the step behind which something is to be done; it is done now."""
        left, self._left = self._left, None
        return left

    def begin_step(self, step: int, consumed: Mapping[str, int]) -> None:
        """`step` begins, before which so much was consumed."""
        self._begun = step
        kept = {one: count for one, count in self._before.items() if one > step - STEPS}
        self._before = {**kept, step: dict(consumed)}
        for one in self._valid:
            one.begin_step(step)

    def behind(self, step: int) -> Behind:
        """Return what a newcomer is told."""
        return Behind(step, self._before.get(step, {}), [replay.given_in(step) for replay in self._valid])

    def before(self, step: int) -> Mapping[str, int]:
        """Return what was consumed before `step`.

        Raises:
            CannotRejoinError: its twin did not know it, so the data would not be those of the step.
        """
        if step not in self._before:
            raise CannotRejoinError(f"its twin does not know what had been consumed before step {step}")
        return self._before[step]

    def agree(self, step: int, all_have: Callable[[bool], bool]) -> None:
        """Learn whether what comes behind `step` is to be done again.

        Args:
            all_have: tells all ranks whether this one has done it, and returns whether all have.
        """
        told, self._told = self._told, None
        if told is not None:  # it has done nothing, and knows from its twin what had been read before
            self._before = {step: dict(told.before)} if told.before else {}
        is_done = told is not None or self._begun > step or step not in self._before
        self._left = None if all_have(is_done) else step
        if self._left is not None:
            self._begun = step
        elif told is not None:  # another incident may come before its next step
            self._begun = step + 1
        for number, one in enumerate(self._valid):
            if told is None:
                one.rewind(step if self._left is None else step - 1)
            elif self._left is None and told.before:
                one.begin_step(step)
                for _ in range(told.read[number]):
                    next(one)
