"""Reads the files of a job again and again, and unchanged files not at all; the newest checkpoint.

A job of months has hundreds of thousands of events, and its metrics are scraped every few seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import msgspec

from adaptor.checkpoint import manifest, tracker
from adaptor.errors import AdaptorError
from adaptor.operations.goodput import COUNTED_USES, Goodput, TimeSpent
from adaptor.protocol import naming
from adaptor.protocol.records import (
    EVENTS_FILE,
    INCIDENTS,
    STALE_S,
    STATUS_FILE,
    Event,
    IncidentRecord,
    IncidentSummary,
    Status,
    unix,
)

_BLOCK = 1 << 16
# The largest age of an answer. Checkpoints are minutes apart.
REFRESH_S = 5.0
# The largest file that is read: the report of 100,000 ranks has 200 MiB.
MOST_BYTES = 1 << 30
_ADVICE = "call ttp in the folder in which ttprun was started, or name the job's TTP_LOG_PATH"
T = TypeVar("T", Status, IncidentRecord, IncidentSummary)
R = TypeVar("R")


class JobReader:
    """Reads one job, for any number of threads.

    Args:
        job: its folder.
    """

    def __init__(self, job: Path) -> None:
        self.job = job
        self._lock = threading.Lock()
        self._summaries = Summaries()
        self._events = _NewEvents(job / EVENTS_FILE)
        self._spent = TimeSpent()

    def status(self) -> Status:
        """Read status.json. Raises JobFolderError."""
        return status(self.job)

    def summaries(self) -> list[IncidentSummary]:
        """Return the summaries of the ended incidents, in order. Raises JobFolderError."""
        with self._lock:
            return self._summaries.of(self.job)

    def spent(self) -> Goodput:
        """Return the job's use of its time until its status was written. Raises JobFolderError."""
        status = self.status()
        with self._lock:
            self._read_on()
            incidents = self._summaries.of(self.job)
            return self._spent.until(
                unix(status.time), newest=status.step, incidents=incidents, uses=status.spent
            )

    def counted(self) -> dict[str, float]:
        """Return the seconds in each state that never decrease. Raises JobFolderError."""
        uses = self.status().spent
        with self._lock:
            self._read_on()
            return {**{use: uses.get(use, 0.0) for use in COUNTED_USES}, **self._spent.closed}

    def changes(self) -> list[tuple[float, str]]:
        """Return the beginning of each state, and its name (see `goodput`). Raises JobFolderError."""
        with self._lock:
            self._read_on()
            return list(self._spent.changes)

    def _read_on(self) -> None:
        if self._events.is_replaced():
            self._spent = TimeSpent()
        for event in self._events:
            self._spent.add(event)


class _NewEvents:
    """Yields the events since the last time, in the order of their file.

    A line that is cut, or of another form, is left out.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._read = 0  # bytes

    def is_replaced(self) -> bool:
        """Return whether the file is another file than before, which is read from its beginning."""
        try:
            stat = self._path.stat()
            identity, size = (stat.st_dev, stat.st_ino), stat.st_size
        except FileNotFoundError:
            identity, size = None, 0
        except OSError as error:
            raise _unreadable(self._path, error) from None
        if identity == self._file and size >= self._read:
            return False
        self._file, self._read = identity, 0
        return True

    def __iter__(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # it is being written
                    self._read += len(line)
                    event = _decoded(line)
                    if event is not None:
                        yield event
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unreadable(self._path, error) from None


def newest_events(job: Path, count: int) -> list[Event]:
    """Return the newest events of a job, at most `count`, in the order of their file.

    Raises:
        JobFolderError: the file cannot be read.
    """
    path = job / EVENTS_FILE
    events: list[Event] = []
    try:
        with path.open("rb") as file:
            for line in _backwards(file.fileno()):
                event = _decoded(line)
                if event is not None:
                    events.append(event)
                if len(events) == count:
                    break
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(path, error) from None
    return events[::-1]


def _backwards(descriptor: int) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    place = os.fstat(descriptor).st_size
    remainder = b""
    while place > 0:
        begin = max(0, place - _BLOCK)
        remainder, *lines = (os.pread(descriptor, place - begin, begin) + remainder).split(b"\n")
        place = begin
        yield from reversed(lines)
    yield remainder


def _decoded(line: bytes) -> Event | None:
    try:
        return msgspec.json.decode(line, type=Event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # cut by a full disk


def _unreadable(path: Path, error: OSError) -> JobFolderError:
    return JobFolderError(f"{path}: it cannot be read ({error.strerror})")


class CheckpointSummary(NamedTuple):
    """A checkpoint: its step, its time (Unix seconds), the bytes of its files."""

    step: int
    at: float
    size: int


def newest(save: Path) -> CheckpointSummary | None:
    """Return the checkpoint that the tracker of `save` names; None without a manifest."""
    try:
        step = tracker.tracked_step(save)
        if step is None:
            return None
        saved_manifest = manifest.read(save / naming.final_name(step))
        at = datetime.fromisoformat(saved_manifest.created).timestamp()
    except (AdaptorError, OSError, ValueError):
        return None
    return CheckpointSummary(step, at, sum(file.bytes for file in saved_manifest.files))


class NewestCheckpoint:
    """Looks up the newest checkpoint in a save folder again and again, until `close`, in a thread.

    A disk that hangs then stops no scrape.

    Args:
        folder: returns the save folder, '' while unknown.

    Attributes:
        looked: set after the first look
    """

    def __init__(self, folder: Callable[[], str]) -> None:
        self._folder = folder
        self._closed = threading.Event()
        self.looked = threading.Event()
        self.checkpoint: CheckpointSummary | None = None
        # A daemon: it may hang in the file system for ever.
        threading.Thread(target=self._run, name="ttp-checkpoint", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        while True:
            try:
                save = self._folder()
                self.checkpoint = newest(Path(save)) if save else None
            except AdaptorError:
                self.checkpoint = None  # the files of the job cannot be read now
            self.looked.set()
            if self._closed.wait(REFRESH_S):
                return


def protection(status: Status) -> str:
    """Return whether a job is protected, and why not; of an ended job, whether it was protected."""
    if status.protected is None:
        return "never protected" if status.state == "ended" else "not yet protected"
    if status.state == "ended" and status.protected:
        return "it was protected to its end"
    return "protected" if status.protected else f"NOT PROTECTED: {status.why_not}"


def first_step_again(incident: IncidentRecord, fault_at: float) -> float | None:
    """Return the seconds from `fault_at`, in Unix seconds, to the next first step; None: none yet."""
    phases = incident.phases
    if phases.first_step is None:
        return None
    spent = max(0.0, unix(incident.ended) - fault_at)
    return spent + (phases.restart or 0.0) + (phases.load or 0.0) + phases.first_step


class JobFolderError(AdaptorError):
    """The files of a job cannot be read."""


def jobs(log_path: Path) -> list[Path]:
    """Return the folders of jobs in `log_path`, the folder with the newest status last.

    Raises:
        JobFolderError: `log_path` cannot be read.
    """
    try:
        job_folders = [path for path in log_path.iterdir() if (path / STATUS_FILE).is_file()]
        return sorted(job_folders, key=lambda path: (path / STATUS_FILE).stat().st_mtime)
    except OSError as error:
        raise JobFolderError(f"{log_path}: the folder cannot be read ({error.strerror}); {_ADVICE}") from None


def find(folder: Path) -> Path:
    """Return the folder of a job: `folder` itself, or the newest job in `folder`.

    Raises:
        JobFolderError: `folder` is neither.
    """
    if (folder / STATUS_FILE).is_file():
        return folder
    job_folders = jobs(folder)
    if not job_folders:
        raise JobFolderError(f"{folder}: no job has written here; {_ADVICE}")
    return job_folders[-1]


def status(job: Path) -> Status:
    """Read status.json. Raises JobFolderError."""
    return read(job / STATUS_FILE, Status)


def silent_s(status: Status) -> float:
    """Return for how long a job has written no status, in seconds; 0.0 if its status is recent or it has
    ended.
    """
    age = time.time() - unix(status.time)
    return age if status.state != "ended" and age > STALE_S else 0.0


def goes_on(job: Path) -> bool:
    """Return whether a job has not ended and writes its status; False also for an unreadable status."""
    try:
        job_status = status(job)
    except JobFolderError:
        return False
    return job_status.state != "ended" and not silent_s(job_status)


def incidents(job: Path) -> list[IncidentRecord]:
    """Read the files of all ended incidents, in order. Raises JobFolderError."""
    read_incidents = [read(path, IncidentRecord) for path in (job / INCIDENTS).glob("*.json")]
    return sorted(read_incidents, key=lambda incident: (incident.began, incident.incident))


class UnchangedFiles(Generic[R]):
    """The results of `make` for files; the result for a file is made again only after a change."""

    def __init__(self, make: Callable[[Path], R]) -> None:
        self._make = make
        self._results: dict[Path, tuple[tuple[int, int], R]] = {}

    def of(self, paths: Iterable[Path]) -> list[R]:
        """Return the results for the files that exist, in their order. Raises JobFolderError."""
        results: dict[Path, tuple[tuple[int, int], R]] = {}
        for path in paths:
            mark = _mark_of(path)
            if mark is not None:
                kept = self._results.get(path)
                results[path] = kept if kept and kept[0] == mark else (mark, self._make(path))
        self._results = results
        return [result for _, result in results.values()]


class Summaries:
    """The summaries of a job's incidents."""

    def __init__(self) -> None:
        self._files = UnchangedFiles(partial(read, kind=IncidentSummary))

    def of(self, job: Path) -> list[IncidentSummary]:
        """Return the summaries of the incidents of a job, in order. Raises JobFolderError."""
        summaries = self._files.of((job / INCIDENTS).glob("*.json"))
        return sorted(summaries, key=lambda summary: (summary.began, summary.incident))


def _mark_of(path: Path) -> tuple[int, int] | None:
    """Return a value that differs after a change of the file; None without a file. Raises JobFolderError."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from None
    return stat.st_mtime_ns, stat.st_size


def read(path: Path, kind: type[T]) -> T:
    """Read one file of a job. Raises JobFolderError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise JobFolderError(f"{path}: it is larger than {MOST_BYTES >> 20} MiB, and none of ours")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise _unreadable(path, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobFolderError(f"{path}: it was not written by ttprun of this version ({error})") from None
