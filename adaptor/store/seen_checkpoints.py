"""The complete checkpoints of a save folder, in the order in which an uploader has seen them come."""

from __future__ import annotations

from pathlib import Path

from adaptor.checkpoint import manifest, saved_steps
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.store import layout
from adaptor.store.cadence import Saved


class SeenCheckpoints:
    """Reads the folder each time that it is asked; each manifest once.

    Args:
        root: the save folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers: dict[str, int] = {}  # by place
        self._known: dict[tuple[int, int, int], Saved] = {}  # by step, inode and time of the manifest

    def now(self) -> list[Saved]:
        """Return those of the folder in the order in which they came; those of the first look by step."""
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
            return Saved(step, False, f"{folder.name}/unreadable")  # why it is says the push
