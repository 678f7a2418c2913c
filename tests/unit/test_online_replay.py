"""What a training loop has read since a step is given once more."""

from __future__ import annotations

from itertools import count

from adaptor.online.replay import Replay


def read(replay: Replay, step: int, items: int = 2) -> list[int]:
    replay.begin_step(step)
    return [next(replay) for _ in range(items)]


def test_a_step_that_is_made_again_reads_the_same() -> None:
    replay = Replay(count())
    assert [read(replay, step) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5]]
    replay.rewind(2)
    assert [read(replay, step) for step in (3, 4)] == [[4, 5], [6, 7]]


def test_a_step_that_was_begun_reads_on_behind_what_it_has_read() -> None:
    replay = Replay(count())
    read(replay, 1)
    read(replay, 2, items=1)
    replay.rewind(1)
    assert read(replay, 2) == [2, 3]


def test_again_and_again() -> None:
    replay = Replay(count())
    read(replay, 1)
    for items in (2, 1, 0, 2):
        read(replay, 2, items)
        replay.rewind(1)
    assert [read(replay, step) for step in (2, 3)] == [[2, 3], [4, 5]]


def test_two_steps_back() -> None:
    """With a local copy a rank that is ahead goes back one step more."""
    replay = Replay(count())
    for step in (1, 2, 3):
        read(replay, step)
    replay.rewind(1)
    assert [read(replay, step) for step in (2, 3, 4)] == [[2, 3], [4, 5], [6, 7]]


def test_nothing_is_given_again_where_the_step_is_finished() -> None:
    replay = Replay(count())
    read(replay, 1)
    replay.rewind(1)
    assert read(replay, 2) == [2, 3]


def test_how_often_a_step_has_read() -> None:
    replay = Replay(count())
    read(replay, 1)
    read(replay, 2, items=3)
    assert [replay.given_in(step) for step in (1, 2, 3)] == [2, 3, 0]
    replay.rewind(1)
    assert [replay.given_in(step) for step in (1, 2)] == [2, 0]
