"""The complete checkpoints of a save folder, in the order of their arrival, and the one to send next.

A disk of one node has only the files that its ranks have written. In the format `torch_dist` the metadata
names all files of a checkpoint; in the format `torch` the layout file names the folders of all model-parallel
ranks. Without either the files count as whole.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaptor.checkpoint import dcp, disk, layout_file, manifest, tracker
from adaptor.checkpoint.manifest import Manifest, UnreadableError
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.store import catalog

# A folder that is changed twice within the resolution of its time has the same time; the coarsest is 2 s.
SETTLED_S = 3.0
# Seconds after which the folder is listed in any case: a copy by hand arrives bit by bit, its manifest last.
# Some file systems (a mounted bucket) have no times of folders.
RELIST_S = 30.0
_UNREADABLE = "unreadable"
# The names of files in the metadata of `torch_dist`: a pickle, searched as text, not loaded.
_NAMED = re.compile(rb"__\d{1,9}_\d{1,9}\.distcp")
_LARGEST = 1 << 30  # bytes of the metadata
_SHARDS, _MODEL_PARALLEL = ".distcp", "mp_rank_"


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of the save folder.

    Attributes:
        place: distinguishes checkpoints of the same step (`catalog.place`)
    """

    step: int
    last_words: bool
    place: str = ""


@dataclass(frozen=True)
class Choice:
    """The checkpoint to send next, and the earlier due checkpoints that are skipped."""

    saved: Saved
    skipped: list[Saved]


def choose(pending: Sequence[Saved], last: int | None, every: int, *, at_end: bool) -> Choice | None:
    """Return the checkpoint to send next, None if none is due.

    Of the due checkpoints only the newest is sent: a job resumes from the newest.

    Args:
        pending: checkpoints that are neither sent nor given up, in the order of their saves. A job that has
            gone back saves earlier steps again.
        last: the step that was sent or given up last, None without one.
        every: the smallest number of steps between two sent checkpoints; last words are always sent.
        at_end: the job has ended, so the newest checkpoint is always due.
    """
    due: list[Saved] = []
    newest_step = last
    for saved in pending:
        forced = saved.last_words or (at_end and saved is pending[-1])
        if newest_step is None or forced or saved.step <= newest_step or saved.step - newest_step >= every:
            due.append(saved)
            newest_step = saved.step
    return Choice(due[-1], due[:-1]) if due else None


class SeenCheckpoints:
    """Reads the folder when its time has changed, because checkpoints arrive by a rename; each manifest once.

    Args:
        root: the save folder.
        clock: in seconds.
    """

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._numbers: dict[str, int] = {}  # by place
        self._saved_by_manifest: dict[
            tuple[int, int, int], Saved
        ] = {}  # by step, inode and time of the manifest
        self._given_up: set[str] = set()  # places
        self._state: tuple[int, ...] | None = None  # of the folder at the last look; None where it has none
        self._since = 0.0  # when that was seen for the first time
        self._listed: list[Saved] | None = None  # the content while the folder is unchanged; None: list again
        self._listed_at = 0.0

    def now(self) -> list[Saved]:
        """Return the checkpoints of the folder in the order of arrival; at the first look by step.

        If the tracker names an earlier step at the first look, a user has gone back: later steps are left
        out.
        """
        state, current_time = self._state_of_folder(), self._clock()
        if state != self._state:
            self._state, self._since, self._listed = state, current_time, None
        if self._listed is None or current_time - self._listed_at >= RELIST_S:
            self._listed = None
            all_saved = self._list()
            is_known = state is not None and not any(saved.place.endswith(_UNREADABLE) for saved in all_saved)
            if not is_known or current_time - self._since < SETTLED_S:
                return all_saved
            self._listed, self._listed_at = all_saved, current_time
        return list(self._listed)

    def look_anew(self) -> None:
        """Let the next `now` list the folder, whatever its time is."""
        self._listed = None

    def _state_of_folder(self) -> tuple[int, ...] | None:
        """Return a value that differs after a name has appeared or disappeared.

        The folder is opened: an NFS client asks the server then, and answers a stat from its cache of the
        last minute. A copying user cannot set the time of change, unlike the time of modification.
        """
        try:
            descriptor = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
        return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns

    def _list(self) -> list[Saved]:
        all_saved = [
            self._look_at(step)
            for step in tracker.steps(self._root)
            if tracker.has_manifest(self._root, step)
        ]
        if not self._numbers:
            self._given_up = self._later_than_tracker(all_saved)
        all_saved = [saved for saved in all_saved if saved.place not in self._given_up]
        for saved in all_saved:
            self._numbers.setdefault(saved.place, len(self._numbers))
        return sorted(all_saved, key=lambda saved: self._numbers[saved.place])

    def _later_than_tracker(self, all_saved: list[Saved]) -> set[str]:
        """Return the places of the steps after the step of the tracker.

        A checkpoint that has just got its name, before the tracker names it, does not count: it is newer than
        the tracker.
        """
        try:
            tracker_time_ns = (self._root / naming.TRACKER).stat().st_mtime_ns
            named = tracker.tracked_step(self._root)
            newer = [saved for saved in all_saved if named is not None and saved.step > named]
            return {
                saved.place
                for saved in newer
                if self._manifest(saved.step).stat().st_mtime_ns <= tracker_time_ns
            }
        except OSError:
            return set()

    def until(self, last: Saved) -> set[str]:
        """Return the places of all checkpoints ever seen that came before `last`, and its own."""
        number = self._numbers[last.place]
        return {place for place, saved_number in self._numbers.items() if saved_number <= number}

    def last_words_after(self, saved: Saved) -> Saved | None:
        """Return the newest last words of the folder that came after `saved`, or None."""
        number = self._numbers[saved.place]
        newer = [
            newer_saved
            for newer_saved in self.now()
            if newer_saved.last_words and self._numbers[newer_saved.place] > number
        ]
        return newer[-1] if newer else None

    def _look_at(self, step: int) -> Saved:
        """Return the checkpoint of a step from its manifest."""
        folder = self._root / naming.final_name(step)
        try:
            status = self._manifest(step).stat()
            key = (step, status.st_ino, status.st_mtime_ns)
            if key not in self._saved_by_manifest:
                saved_manifest = manifest.read(folder)
                self._saved_by_manifest[key] = Saved(
                    step, bool(saved_manifest.groups), catalog.place(saved_manifest)
                )
            return self._saved_by_manifest[key]
        except (OSError, CheckpointError):
            return Saved(step, False, f"{folder.name}/{_UNREADABLE}")  # the push says why

    def _manifest(self, step: int) -> Path:
        return self._root / naming.final_name(step) / naming.MANIFEST


def missing(folder: Path, paths: Iterable[str]) -> str:
    """Return a needed file or folder that is not among `paths`; '' if all are present.

    Args:
        folder: of the checkpoint, with the metadata or the layout file.
        paths: of files, below the folder.

    Raises:
        CheckpointError: the metadata are gone.
        UnreadableError: the disk does not answer as it should.
    """
    have = set(paths)
    if dcp.METADATA in have:
        needed_files, present_files = _named(folder), have
    elif any(path.endswith(_SHARDS) for path in have):
        return dcp.METADATA
    elif names_folders(have):
        needed_files, present_files = _folders(folder), {path.partition("/")[0] for path in have}
    else:
        return ""
    return min(needed_files - present_files, default="")


def names_files(paths: Iterable[str]) -> bool:
    """Return whether the files include the metadata that name all files of ranks."""
    return dcp.METADATA in paths


def names_folders(paths: Iterable[str]) -> bool:
    """Return whether the files include a layout file, which names all ranks' folders (format `torch`)."""
    have = set(paths)
    return naming.LAYOUT in have and any(path.startswith(_MODEL_PARALLEL) for path in have)


def is_part(folder: Path, saved_manifest: Manifest) -> bool:
    """Return whether the folder of a checkpoint has only the files that some ranks have saved, or load.

    Args:
        folder: of the checkpoint.
        saved_manifest: its manifest.

    Raises:
        UnreadableError: the disk does not answer as it should.
    """
    return saved_manifest.part or bool(missing(folder, [file.path for file in saved_manifest.files]))


def require(folder: Path, paths: Iterable[str]) -> None:
    """Refuse files that are no whole checkpoint; the arguments are as in `missing`.

    Raises:
        CheckpointError: names the missing file or folder.
    """
    if name := missing(folder, paths):
        raise CheckpointError(
            f"{folder}: {name} is missing, so the store does not get this checkpoint: it is on the disk of a"
            " node that has not sent its files; with a --save folder that all nodes share this cannot happen"
        )


def _named(folder: Path) -> set[str]:
    path = folder / dcp.METADATA
    try:
        return {name.decode() for name in _NAMED.findall(disk.read(path, _LARGEST))}
    except OSError as error:
        kind = CheckpointError if disk.is_wrong(error) else UnreadableError
        raise kind(f"{path}: cannot be read ({error.strerror or error})") from None


def _folders(folder: Path) -> set[str]:
    try:
        return layout_file.folders(folder / naming.LAYOUT)
    except CheckpointError:
        return set()  # damaged: its checksum tells
