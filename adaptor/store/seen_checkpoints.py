"""The complete checkpoints of a save folder, in the order in which an uploader has seen them come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from adaptor.checkpoint import manifest, saved_steps
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.store import layout
from adaptor.store.cadence import Saved

# A folder that is changed twice within the resolution of its time has the same time; the coarsest is 2 s.
SETTLED_S = 3.0
_UNREADABLE = "unreadable"


class SeenCheckpoints:
    """Reads the folder when its time has changed, for each checkpoint comes by a rename; each manifest once.

    Args:
        root: the save folder.
        clock: in seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._numbers: dict[str, int] = {}  # by place
        self._known: dict[tuple[int, int, int], Saved] = {}  # by step, inode and time of the manifest
        self._changed: int | None = None  # the time of the folder at the last look; None where it has none
        self._since = 0.0  # when that was seen for the first time
        self._listed: list[Saved] | None = (
            None  # what is there as long as that time stays; None: list it again
        )

    def now(self) -> list[Saved]:
        """Return those of the folder in the order in which they came; those of the first look by step."""
        changed, now = self._time_of_folder(), self._clock()
        if changed != self._changed:
            self._changed, self._since, self._listed = changed, now, None
        if self._listed is None:
            found = self._list()
            is_known = changed is not None and not any(one.place.endswith(_UNREADABLE) for one in found)
            if not is_known or now - self._since < SETTLED_S:
                return found
            self._listed = found
        return list(self._listed)

    def _time_of_folder(self) -> int | None:
        try:
            return self._root.stat().st_mtime_ns
        except OSError:
            return None

    def _list(self) -> list[Saved]:
        found = [
            self._look_at(step)
            for step in saved_steps.steps(self._root)
            if saved_steps.has_manifest(self._root, step)
        ]
        for one in found:
            self._numbers.setdefault(one.place, len(self._numbers))
        return sorted(found, key=lambda one: self._numbers[one.place])

    def until(self, last: Saved) -> set[str]:
        """Return the places of those that came before `last`, and its own; of all that were ever seen."""
        number = self._numbers[last.place]
        return {place for place, found in self._numbers.items() if found <= number}

    def last_words_after(self, one: Saved) -> Saved | None:
        """Return the newest last words of the folder that came after `one`; None where there are none."""
        number = self._numbers[one.place]
        newer = [found for found in self.now() if found.last_words and self._numbers[found.place] > number]
        return newer[-1] if newer else None

    def _look_at(self, step: int) -> Saved:
        """Return what the manifest of a step tells."""
        folder = self._root / naming.final_name(step)
        try:
            status = (folder / naming.MANIFEST).stat()
            key = (step, status.st_ino, status.st_mtime_ns)
            if key not in self._known:
                known = manifest.read(folder)
                self._known[key] = Saved(step, bool(known.groups), layout.place(known))
            return self._known[key]
        except (OSError, CheckpointError):
            return Saved(step, False, f"{folder.name}/{_UNREADABLE}")  # why it is says the push
