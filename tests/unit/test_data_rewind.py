"""Data that a training loop has read since a step is provided again."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from adaptor.online import data_rewind
from adaptor.online.data_rewind import DataRewind
from adaptor.worker.processor import CannotRejoinError


def read(replay: DataRewind, step: int, items: int = 2) -> list[int]:
    replay.begin_step(step)
    return [next(replay) for _ in range(items)]


def test_a_step_that_is_made_again_reads_the_same() -> None:
    replay = DataRewind(count())
    assert [read(replay, step) for step in (1, 2, 3)] == [[0, 1], [2, 3], [4, 5]]
    replay.rewind(2)
    assert [read(replay, step) for step in (3, 4)] == [[4, 5], [6, 7]]


def test_a_begun_step_reads_on_after_its_last_item() -> None:
    replay = DataRewind(count())
    read(replay, 1)
    read(replay, 2, items=1)
    replay.rewind(1)
    assert read(replay, 2) == [2, 3]


def test_a_batch_that_was_changed_comes_as_it_was() -> None:
    """On each repetition, although each repetition changes the batch."""
    replay = DataRewind(iter([{"tokens": [1, 2, 3, 4]}, [5, 6, 7, 8]]))
    for _ in range(3):
        replay.begin_step(1)
        batch, packed = next(replay), next(replay)
        assert (batch, packed) == ({"tokens": [1, 2, 3, 4]}, [5, 6, 7, 8])
        batch["tokens"] = batch["tokens"][:2]
        packed.clear()
        replay.rewind(0)


def test_a_step_is_rewound_repeatedly() -> None:
    replay = DataRewind(count())
    read(replay, 1)
    for items in (2, 1, 0, 2):
        read(replay, 2, items)
        replay.rewind(1)
    assert [read(replay, step) for step in (2, 3)] == [[2, 3], [4, 5]]


def test_two_steps_back() -> None:
    """With a local copy a rank that is ahead goes back one step more."""
    replay = DataRewind(count())
    for step in (1, 2, 3):
        read(replay, step)
    replay.rewind(1)
    assert [read(replay, step) for step in (2, 3, 4)] == [[2, 3], [4, 5], [6, 7]]


def test_a_finished_step_is_not_rewound() -> None:
    replay = DataRewind(count())
    read(replay, 1)
    replay.rewind(1)
    assert read(replay, 2) == [2, 3]


def test_the_number_of_reads_of_a_step() -> None:
    replay = DataRewind(count())
    read(replay, 1)
    read(replay, 2, items=3)
    assert [replay.given_in(step) for step in (1, 2, 3)] == [2, 3, 0]
    replay.rewind(1)
    assert [replay.given_in(step) for step in (1, 2)] == [2, 0]


class FailsOnce(Iterator[int]):
    """An iterator of numbers; like torch's iterators it advances before it raises."""

    def __init__(self, fails_at: int) -> None:
        self._numbers = count()
        self._fails_at = fails_at

    def __next__(self) -> int:
        number = next(self._numbers)
        if number == self._fails_at:
            raise OSError("a bad sample")
        return number


def test_after_a_failed_read_nothing_is_provided_again() -> None:
    """The next item would be the item after the failed one."""
    replay = DataRewind(FailsOnce(3))
    read(replay, 1)
    with pytest.raises(OSError, match="a bad sample"):
        read(replay, 2)
    for _ in range(2):  # a recovery has a second attempt
        with pytest.raises(CannotRejoinError, match="its data loader has failed, and would leave out"):
            replay.rewind(1)


def test_a_script_that_reads_on_after_a_failure_has_left_the_item_out_itself() -> None:
    replay = DataRewind(FailsOnce(3))
    read(replay, 1)
    with pytest.raises(OSError, match="a bad sample"):
        read(replay, 2)
    assert next(replay) == 4
    replay.rewind(1)
    assert read(replay, 2) == [2, 4]


def test_the_end_of_the_data_is_no_failure() -> None:
    replay = DataRewind(iter(range(3)))
    read(replay, 1)
    assert next(replay) == 2
    with pytest.raises(StopIteration):
        next(replay)
    replay.rewind(0)
    assert read(replay, 1) == [0, 1]


# As in any job with data loaders, the forking process has threads.
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_that_reads_ahead_has_died() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    numbers: Any = range(8)
    source: Any = iter(DataLoader(numbers, batch_size=None, num_workers=1))
    try:
        # torch's handler would raise here, at a moment that depends on the machine.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        replay = DataRewind(source)
        assert read(replay, 1) == [0, 1]
        replay.rewind(0)
        (process,) = source._workers
        process.kill()
        process.join()
        with pytest.raises(CannotRejoinError, match="a process of its data loader has died"):
            replay.rewind(0)
    finally:
        source._shutdown_workers()
        signal.signal(signal.SIGCHLD, handler)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    mask = torch.ones(8)
    return ({"tokens": torch.tensor([number]), "mask": mask.clone()} for number in count())


def read_tokens(replay: DataRewind, step: int, oldest: int) -> list[int]:
    replay.begin_step(step, oldest)
    return [int(next(replay)["tokens"]) for _ in range(2)]


def test_many_steps_back_to_a_copy_in_host_memory() -> None:
    """Data read since the copy's step is provided again, twice."""
    replay = DataRewind(batches())
    tokens_by_step = {step: read_tokens(replay, step, oldest=2) for step in range(1, 9)}
    for _ in range(2):
        replay.rewind(2)
        assert {step: read_tokens(replay, step, oldest=2) for step in range(3, 9)} == {
            step: tokens_by_step[step] for step in range(3, 9)
        }
    read_tokens(replay, 9, oldest=5)
    with pytest.raises(CannotRejoinError, match="after step 4 is not kept"):
        replay.rewind(4)
    replay.rewind(5)
    assert read_tokens(replay, 6, oldest=5) == tokens_by_step[6]


def test_too_much_data_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal tensors count once: of 8 steps only the tokens are kept, 16 bytes a step."""
    monkeypatch.setattr(data_rewind, "MOST_BYTES", 100)
    replay = DataRewind(batches())
    for step in range(1, 9):
        read_tokens(replay, step, oldest=0)
    assert 0 < replay.oldest <= 6
    with pytest.raises(CannotRejoinError, match="is not kept"):
        replay.rewind(replay.oldest - 1)
    replay.rewind(replay.oldest)
    assert read_tokens(replay, replay.oldest + 1, oldest=0) == [2 * replay.oldest, 2 * replay.oldest + 1]


def test_data_of_another_form_is_kept_for_two_steps() -> None:
    replay = DataRewind(count())
    for step in range(1, 6):
        replay.begin_step(step, 0)
        next(replay)
    assert replay.oldest == 3
    replay.rewind(3)
    replay.begin_step(4, 0)
    assert next(replay) == 3
