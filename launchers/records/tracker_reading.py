"""Reads what the tracker of a save folder names, beside everything else: the disk may hang."""

from __future__ import annotations

import contextlib
from pathlib import Path

from adaptor import threads
from adaptor.checkpoint.tracker import tracked_step

# A save folder may be what hangs. The last line waits this long for what its tracker names, which is read
# while the workers end; and ttprun waits so much longer, to tell it in a line of its own.
PROMPT_S = 0.5
TRACKER_S = 2.0


class TrackerReading:
    """The tracker of a save folder, read at once, in another thread.

    Args:
        save: the folder; '' where there is none.
    """

    def __init__(self, save: str) -> None:
        self.save = save
        self._read: threads.Background[tuple[int | None]] | None = None
        if save:
            with contextlib.suppress(RuntimeError):  # no thread: then without it
                self._read = threads.Background(lambda: (tracked_step(Path(save)),), "ttp-tracker")

    @property
    def answers(self) -> bool:
        """Return whether the disk answers at once, or need not."""
        return self._read is None or self._read.within(PROMPT_S) is not None

    @property
    def step(self) -> int | None:
        """Return the step that it names, 0 where there is no checkpoint; None where nobody can tell."""
        tracker_answer = self._found
        return None if tracker_answer is None else tracker_answer[0] or 0

    @property
    def words(self) -> str:
        """Name the newest checkpoint; '' where the disk hangs, or there is no folder."""
        tracker_answer = self._found
        if tracker_answer is None:
            return ""
        step = tracker_answer[0]
        return (
            f"no checkpoint is in {self.save}"
            if step is None
            else f"the newest checkpoint in {self.save} is step {step}"
        )

    @property
    def _found(self) -> tuple[int | None] | None:
        return None if self._read is None else self._read.within(TRACKER_S)
