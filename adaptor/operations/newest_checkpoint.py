"""The newest checkpoint in a save folder, looked up by a thread of its own.

A disk that hangs then stops no scrape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from adaptor.checkpoint import manifest, tracker
from adaptor.errors import AdaptorError
from adaptor.protocol import naming

# How old an answer may be. A checkpoint is written every some minutes at most.
REFRESH_S = 5.0


class Checkpoint(NamedTuple):
    """A checkpoint: its step, when it was written (Unix seconds), the bytes in its files."""

    step: int
    at: float
    size: int


def newest(save: Path) -> Checkpoint | None:
    """Return the checkpoint that the tracker of `save` names; None if there is none with a manifest."""
    try:
        step = tracker.tracked_step(save)
        if step is None:
            return None
        saved_manifest = manifest.read(save / naming.final_name(step))
        at = datetime.fromisoformat(saved_manifest.created).timestamp()
    except (AdaptorError, OSError, ValueError):
        return None
    return Checkpoint(step, at, sum(file.bytes for file in saved_manifest.files))


class NewestCheckpoint:
    """Looks it up again and again, until `close`.

    Args:
        folder: returns the save folder, '' while it is not known.

    Attributes:
        looked: set when it was looked up for the first time
    """

    def __init__(self, folder: Callable[[], str]) -> None:
        self._folder = folder
        self._closed = threading.Event()
        self.looked = threading.Event()
        self.found: Checkpoint | None = None
        # A daemon: it may hang in the file system for ever.
        threading.Thread(target=self._run, name="ttp-checkpoint", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while True:
            try:
                save = self._folder()
                self.found = newest(Path(save)) if save else None
            except AdaptorError:
                self.found = None  # the files of the job cannot be read just now
            self.looked.set()
            if self._closed.wait(REFRESH_S):
                return
