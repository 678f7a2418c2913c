"""The part that a rank has of a view of a world tensor whose elements stand in another order in the file.

A framework may save a weight turned round (`planned_tensors.Source.view`). The elements that one rank has
follow each other in the world tensor; in the file they are many short runs, unless they are whole matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from adaptor.checkpoint import shards
from adaptor.checkpoint.planned_tensors import CannotBePlanned, Source

# Of all ranks of a group: each takes some 60 µs, and a few bytes of a message.
_MOST_RUNS = 100_000


class StridedView:
    """A view of a world tensor.

    Args:
        begin: its first element in the world tensor.
        view: of each dimension its size and its step in the world tensor, which is 1 or more.
    """

    def __init__(self, begin: int, view: Sequence[tuple[int, int]]) -> None:
        *outer, (self._length, self._step) = view
        self._in_matrix = outer[-1][0] if outer else 1  # rows
        self._rows = torch.full((1,), begin, dtype=torch.int64, device="cpu")
        for size, step in outer:
            places = torch.arange(size, dtype=torch.int64, device="cpu") * step
            self._rows = (self._rows[:, None] + places).view(-1)

    def runs(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield which of its elements lie in [`low`, `high`) of the world tensor: begins and ends of runs.

        Args:
            low: an element of the world tensor.
            high: the one behind the last.
        """
        firsts, lasts = self._within(low, high)
        starts, ends = firsts.tolist(), lasts.tolist()
        if not starts:
            return
        start, end = starts[0], ends[0]
        for first, last in zip(starts[1:], ends[1:], strict=True):
            if first != end:
                yield start, end
                start = first
            end = last
        yield start, end

    def count_runs(self, low: int, high: int) -> int:
        """Return how many runs there are."""
        firsts, lasts = self._within(low, high)
        return len(firsts) - int((firsts[1:] == lasts[:-1]).sum())

    def places(self, first: int, last: int) -> torch.Tensor:
        """Return where the elements [`first`, `last`) of the view stand in the world tensor."""
        numbers = torch.arange(first, last, dtype=torch.int64, device="cpu")
        rows = numbers.div(self._length, rounding_mode="floor")
        return self._rows[rows] + (numbers - rows * self._length) * self._step

    def extent(self, first: int, last: int) -> tuple[int, int]:
        """Return the part of the world tensor with all matrices that have some of [`first`, `last`)."""
        size = self._length * self._in_matrix
        rows = self._rows[first // size * self._in_matrix : ((last - 1) // size + 1) * self._in_matrix]
        return int(rows.min()), int(rows.max()) + (self._length - 1) * self._step + 1

    def _within(self, low: int, high: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return begins and ends of what is in the range, for each row that has something there."""
        first, last = (
            (edge - self._rows + self._step - 1).div(self._step, rounding_mode="floor").clamp(0, self._length)
            for edge in (low, high)
        )
        some = (first < last).nonzero().view(-1)
        filler_before = some * self._length
        return filler_before + first[some], filler_before + last[some]


def require_few_runs(sources: Sequence[Source], optimizers: Sequence[Any]) -> None:
    """Refuse what the ranks of a group would have to write in too many short runs.

    Args:
        sources: that stand for tensors of the file.
        optimizers: those of the chain.

    Raises:
        CannotBePlanned: there are too many.
    """
    count = 0
    for source in sources:
        if not source.view:
            continue
        view = StridedView(source.begin, source.view)
        optimizer = optimizers[source.position]
        _, ranks = shards.shard_of(optimizer)
        for bucket in shards.buckets_of(optimizer, optimizer.buffers[source.number]):
            for index in range(ranks):
                low, high = bucket.extent(index)
                if max(low, source.begin) < min(high, source.end):
                    count += view.count_runs(low, high)
        if count > _MOST_RUNS:
            raise CannotBePlanned(f"{count} runs of tensors that are turned round")
