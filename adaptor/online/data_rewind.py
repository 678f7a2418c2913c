"""Replays, in a survivor, the data that a training loop has read since a step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from adaptor.worker.processor import CannotRejoinError

# A job goes back to the end of the step before the current step, with TTP_LOCAL_COPY one step further.
STEPS = 2
# A job with copies in host memory goes back further. A rank keeps so many bytes of data at most for that: 50
# steps of 250 samples of 4,096 tokens. If it would need more, all ranks are started again.
MOST_BYTES = 1 << 30


class DataRewind(Iterator[Any]):
    """An iterator that remembers the data of the last steps.

    Args:
        source: where the data comes from.

    Attributes:
        source: see above
        oldest: the oldest step after which all data is known
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._again: deque[Any] = deque()
        self._is_reading = False  # or an exception has ended it
        self._step = 0
        self.oldest = -1
        self._stored: dict[int, int] = {}  # the bytes of each step of which plain copies are kept
        self._like: dict[str, torch.Tensor] = {}  # the newest plain copies: equal tensors are kept once
        # The items of the current step in `_given`, for each read.
        self._now: list[Any] = []
        self._given: dict[int, list[Any]] = {self._step: self._now}

    def __next__(self) -> Any:
        self._is_reading = True
        try:
            item = self._again.popleft() if self._again else next(self.source)
        except StopIteration:
            self._is_reading = False  # nothing is left out at the end of the data
            raise
        # A script may put other tensors into a batch that it was given (Megatron-LM 0.20 cuts sequences so).
        self._now.append(copy.copy(item) if isinstance(item, (dict, list)) else item)
        self._is_reading = False
        return item

    def begin_step(self, step: int, oldest: int | None = None) -> None:
        """Count data read from now on as data of `step`.

        Args:
            oldest: the job never goes back to an earlier step; None: no further than STEPS.
        """
        self._step = step
        recent = step - STEPS
        wanted = recent if oldest is None else min(recent, oldest)
        self.oldest = max(self.oldest, wanted)
        for kept_step in sorted(self._given):
            if self.oldest < kept_step <= recent and kept_step not in self._stored:
                self._store(kept_step)
        self._given = {kept: items for kept, items in self._given.items() if kept > min(self.oldest, recent)}
        self._stored = {kept: size for kept, size in self._stored.items() if kept in self._given}
        self._now = self._given.setdefault(step, [])

    def _store(self, step: int) -> None:
        """Replace the items of `step` by plain copies, which use no memory of loaders or devices.

        If an item is no dict, a tensor is not on the host, or the data is too much, no data up to `step` is
        kept.
        """
        size, items = 0, self._given[step]
        for place, item in enumerate(items):
            if not isinstance(item, dict):
                self.oldest = step
                return
            stored = dict(item)
            for name, value in item.items():
                if not isinstance(value, torch.Tensor):
                    continue
                if not value.is_cpu:
                    self.oldest = step
                    return
                like = self._like.get(name)
                if like is None or like.dtype != value.dtype or not torch.equal(like, value):
                    like = self._like[name] = value.to("cpu", copy=True)
                    size += like.nbytes
                stored[name] = like
            items[place] = stored
        self._stored[step] = size
        if sum(self._stored.values()) > MOST_BYTES:
            self.oldest = step

    def given_in(self, step: int) -> int:
        """Return the number of reads between the begin of `step` and the begin of the next step."""
        return len(self._given.get(step, ()))

    def rewind(self, step: int) -> None:
        """Give all data read after `step` again. Raises CannotRejoinError: the data is gone."""
        if step < self.oldest:
            raise CannotRejoinError(f"the data that it has read after step {step} is not kept")
        # torch's iterators have gone on before they raise, so the next read would give the item after it.
        if self._is_reading:
            raise CannotRejoinError("its data loader has failed, and would leave out what it was reading")
        if self._has_lost_process():
            raise CannotRejoinError("a process of its data loader has died, and with it what it was reading")
        later_items = [
            item for kept_step in sorted(self._given) if kept_step > step for item in self._given[kept_step]
        ]
        self._again.extendleft(reversed(later_items))
        self._given = {kept_step: items for kept_step, items in self._given.items() if kept_step <= step}
        self._now = self._given.setdefault(self._step, [])

    def _has_lost_process(self) -> bool:
        """Return whether a process that reads ahead for a torch iterator has died.

        torch reports the death by an exception wherever the main thread is. For an iterator of another kind
        the death is not visible here: then the read from the dead process fails.
        """
        # A process whose data have come to an end may end, and is not expected to live.
        processes = getattr(self.source, "_workers", None)
        expected = getattr(self.source, "_workers_status", None)
        if not isinstance(processes, list) or not isinstance(expected, list):
            return False
        return any(
            lives and not loader_process.is_alive()
            for loader_process, lives in zip(processes, expected, strict=True)
        )
