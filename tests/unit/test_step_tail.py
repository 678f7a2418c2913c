"""The tail of a step (work after the update) is repeated with the same data on ranks without the tail."""

from __future__ import annotations

from itertools import count

import pytest

from adaptor.frameworks.step_tail import StepTail, TailState
from adaptor.online.data_rewind import STEPS, DataRewind
from adaptor.worker.processor import CannotRejoinError


def tail(state: TailState | None = None) -> tuple[StepTail, DataRewind]:
    valid = DataRewind(count())
    return StepTail([valid], state), valid


def train(rank: StepTail, *steps: int) -> None:
    for step in steps:
        rank.begin_step(step, {"consumed_train_samples": 4 * (step - 1)}, step - STEPS)


def agree(step: int, *ranks: StepTail) -> list[int | None]:
    """Return the pending step of each rank after all ranks exchanged their state."""
    answers: list[bool] = []
    for rank in ranks:
        rank.agree(step, lambda is_done: answers.append(is_done) or False)  # type: ignore[func-returns-value]
    return [step if not all(answers) else None for _ in ranks]


def test_a_rank_in_the_next_step_has_done_the_tail() -> None:
    (first, valid), (second, _) = tail(), tail()
    train(first, 4, 5)
    next(valid)
    train(second, 4, 5)
    answers: list[bool] = []
    for rank in (first, second):
        rank.agree(4, lambda is_done: bool(answers.append(is_done)) or True)  # type: ignore[func-returns-value]
    assert answers == [True, True]
    assert not first.is_pending
    assert first.take_pending() is None


def test_all_ranks_repeat_the_tail_if_one_has_not_done_it() -> None:
    (first, valid), (second, _) = tail(), tail()
    train(first, 4)
    assert [next(valid), next(valid)] == [0, 1]
    train(second, 4)
    assert agree(4, first, second) == [4, 4]
    assert (first.is_pending, dict(first.consumed_before(4))) == (True, {"consumed_train_samples": 12})
    assert [next(valid), next(valid)] == [0, 1]
    assert (first.take_pending(), first.take_pending()) == (4, None)


def test_a_newcomer_reads_on_after_the_last_item_of_its_twin() -> None:
    twin, valid = tail()
    train(twin, 4)
    next(valid)
    train(twin, 5)
    newcomer, its = tail(twin.state(4))
    newcomer.agree(4, lambda is_done: is_done)
    assert next(its) == next(valid)


def test_a_newcomer_whose_twin_does_not_know_the_step_does_not_guess() -> None:
    """Another survivor has the step, and has not done its tail."""
    (twin, _), (survivor, _) = tail(), tail()
    train(twin, 6, 7)
    train(survivor, 4)
    newcomer, _ = tail(twin.state(4))
    newcomer.agree(4, lambda is_done: False)
    assert newcomer.is_pending
    with pytest.raises(CannotRejoinError, match="does not know what had been consumed before step 4"):
        newcomer.consumed_before(4)
