"""The tail of a step, an evaluation and a regular save, which a recovery may have to make again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from adaptor.online.data_rewind import DataRewind
from adaptor.worker.processor import CannotRejoinError

# The counts of so many steps are kept before the older ones are looked for.
_MOST_STEPS = 8


class TailState(NamedTuple):
    """The state of the tail of `step`, for a newcomer.

    Attributes:
        consumed_before: the counts of consumed samples before the step; empty: the reporting process did not
            begin it
        reads: the number of reads of each iterator of validation data in the step's tail
    """

    step: int
    consumed_before: dict[str, int]
    reads: list[int]


class StepTail:
    """The knowledge of a rank about the tail of its step: an evaluation and a regular save.

    A rank that has begun step N + 1 has finished the tail of step N. If any rank has not, all ranks repeat
    the tail, with the counts of consumed samples from before step N.

    Args:
        validation: the rank's validation data, in the order of the framework's iterators.
        from_twin: in a newcomer, the state reported by its twin; else None.
    """

    def __init__(self, validation: Sequence[DataRewind], from_twin: TailState | None) -> None:
        self._validation = validation
        self._from_twin = from_twin
        self._begun = 0  # the newest step
        self._consumed_before: dict[int, dict[str, int]] = {}  # of the last steps, by step
        self._pending_step: int | None = None  # the step whose tail is to be repeated

    @property
    def is_pending(self) -> bool:
        """Return whether the tail of a step is to be repeated."""
        return self._pending_step is not None

    def take_pending(self) -> int | None:
        """Return the step whose tail the caller repeats now; None where there is none."""
        pending, self._pending_step = self._pending_step, None
        return pending

    def begin_step(self, step: int, consumed: Mapping[str, int], oldest: int) -> None:
        """Note that `step` begins, with the counts of samples `consumed` before it.

        Args:
            oldest: the job never goes back before this step.
        """
        self._begun = step
        consumed_by_step = self._consumed_before
        consumed_by_step[step] = dict(consumed)
        if len(consumed_by_step) > _MOST_STEPS:
            self._consumed_before = {
                kept_step: counts for kept_step, counts in consumed_by_step.items() if kept_step >= oldest
            }
        for replay in self._validation:
            replay.begin_step(step, oldest)

    def state(self, step: int) -> TailState:
        """Return the state of the tail of `step`, for a newcomer."""
        reads = [replay.given_in(step) for replay in self._validation]
        return TailState(step, self._consumed_before.get(step, {}), reads)

    def consumed_before(self, step: int) -> Mapping[str, int]:
        """Return the counts of samples consumed before `step`.

        Raises:
            CannotRejoinError: the twin did not know the counts, so the data would differ from the step's.
        """
        if step not in self._consumed_before:
            raise CannotRejoinError(f"its twin does not know what had been consumed before step {step}")
        return self._consumed_before[step]

    def agree(self, step: int, all_have: Callable[[bool], bool]) -> None:
        """Agree with all ranks whether the tail of `step` is to be repeated; collective.

        Args:
            step: the step from which all go on.
            all_have: tells all ranks whether this rank has finished the tail; returns whether all have.
        """
        twins, self._from_twin = self._from_twin, None
        if twins is None:
            self._agree_as_survivor(step, all_have)
        else:
            self._agree_as_newcomer(step, twins, all_have)

    def _agree_as_survivor(self, step: int, all_have: Callable[[bool], bool]) -> None:
        has_finished = self._begun > step or step not in self._consumed_before
        repeats = not all_have(has_finished)
        if repeats:
            self._pending_step = self._begun = step
        for replay in self._validation:
            replay.rewind(step - 1 if repeats else step)

    def _agree_as_newcomer(self, step: int, twins: TailState, all_have: Callable[[bool], bool]) -> None:
        """Count as finished: this process has begun no step, and takes the twin's knowledge."""
        self._consumed_before = {step: dict(twins.consumed_before)} if twins.consumed_before else {}
        repeats = not all_have(True)
        if repeats:
            self._pending_step = self._begun = step
        else:
            self._begun = step + 1  # another incident may come before its next step
        if not repeats and twins.consumed_before:
            for replay, reads in zip(self._validation, twins.reads, strict=True):
                replay.begin_step(step)
                for _ in range(reads):
                    next(replay)
