"""What comes behind a step is made again where a rank has not done it, with the data of then."""

from __future__ import annotations

from itertools import count

import pytest

from adaptor.frameworks.training_loop import StepTail, TailState
from adaptor.online.data_rewind import STEPS, DataRewind
from adaptor.worker.processor import CannotRejoinError


def tail(told: TailState | None = None) -> tuple[StepTail, DataRewind]:
    valid = DataRewind(count())
    return StepTail([valid], told), valid


def train(one: StepTail, *steps: int) -> None:
    for step in steps:
        one.begin_step(step, {"consumed_train_samples": 4 * (step - 1)}, step - STEPS)


def agree(step: int, *ranks: StepTail) -> list[int | None]:
    """What each has left, when all have told each other."""
    told: list[bool] = []
    for rank in ranks:
        rank.agree(step, lambda is_done: told.append(is_done) or False)  # type: ignore[func-returns-value]
    return [step if not all(told) else None for _ in ranks]


def test_a_rank_in_the_next_step_has_done_it() -> None:
    (one, valid), (other, _) = tail(), tail()
    train(one, 4, 5)
    next(valid)
    train(other, 4, 5)
    told: list[bool] = []
    for rank in (one, other):
        rank.agree(4, lambda is_done: bool(told.append(is_done)) or True)  # type: ignore[func-returns-value]
    assert told == [True, True]
    assert not one.is_pending
    assert one.take_pending() is None


def test_where_one_has_not_done_it_all_do_it_again() -> None:
    (one, valid), (other, _) = tail(), tail()
    train(one, 4)
    assert [next(valid), next(valid)] == [0, 1]
    train(other, 4)
    assert agree(4, one, other) == [4, 4]
    assert (one.is_pending, dict(one.consumed_before(4))) == (True, {"consumed_train_samples": 12})
    assert [next(valid), next(valid)] == [0, 1]
    assert (one.take_pending(), one.take_pending()) == (4, None)


def test_a_newcomer_reads_on_behind_what_its_twin_has_read() -> None:
    twin, valid = tail()
    train(twin, 4)
    next(valid)
    train(twin, 5)
    newcomer, its = tail(twin.state(4))
    newcomer.agree(4, lambda is_done: is_done)
    assert next(its) == next(valid)


def test_a_newcomer_whose_twin_does_not_know_the_step_does_not_guess() -> None:
    """Another survivor does, and has not done what comes behind it."""
    (twin, _), (other, _) = tail(), tail()
    train(twin, 6, 7)
    train(other, 4)
    newcomer, _ = tail(twin.state(4))
    newcomer.agree(4, lambda is_done: False)
    assert newcomer.is_pending
    with pytest.raises(CannotRejoinError, match="does not know what had been consumed before step 4"):
        newcomer.consumed_before(4)
