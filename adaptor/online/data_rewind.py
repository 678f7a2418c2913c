"""Replays the data that a training loop has read since a step."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

from adaptor.worker.processor import CannotRejoinError

# A job goes back to the end of the step before the current step, with TTP_LOCAL_COPY one step further.
STEPS = 2


class DataRewind(Iterator[Any]):
    """An iterator that remembers the data of the last steps.

    Args:
        source: where the data comes from.

    Attributes:
        source: see above
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._again: deque[Any] = deque()
        self._is_reading = False  # or an exception has ended it
        self._step = 0
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

    def begin_step(self, step: int) -> None:
        """Count data read from now on as data of `step`."""
        self._step = step
        self._given = {
            kept_step: items for kept_step, items in self._given.items() if kept_step > step - STEPS
        }
        self._now = self._given.setdefault(step, [])

    def given_in(self, step: int) -> int:
        """Return the number of reads between the begin of `step` and the begin of the next step."""
        return len(self._given.get(step, ()))

    def rewind(self, step: int) -> None:
        """Give all data read after `step` again. Raises CannotRejoinError: the data is gone."""
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
