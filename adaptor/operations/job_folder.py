"""The folder of a job below TTP_LOG_PATH, and its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeVar

import msgspec

from adaptor.errors import AdaptorError
from adaptor.protocol.records import INCIDENTS, STALE_S, STATUS_FILE, Incident, IncidentSummary, Status, unix

# The largest file that is read: the report of 100,000 ranks has 200 MiB.
MOST_BYTES = 1 << 30
_ADVICE = "call ttp in the folder in which ttprun was started, or name the job's TTP_LOG_PATH"

T = TypeVar("T", Status, Incident, IncidentSummary)


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


def incidents(job: Path) -> list[Incident]:
    """Read the files of all ended incidents, in order. Raises JobFolderError."""
    read_incidents = [read(path, Incident) for path in (job / INCIDENTS).glob("*.json")]
    return sorted(read_incidents, key=lambda incident: (incident.began, incident.incident))


class Summaries:
    """The summaries of a job's incidents; a file is read again only after a change."""

    def __init__(self) -> None:
        self._read: dict[Path, tuple[tuple[int, int], IncidentSummary]] = {}

    def of(self, job: Path) -> list[IncidentSummary]:
        """Return the summaries of the incidents of a job, in order. Raises JobFolderError."""
        entries_by_path: dict[Path, tuple[tuple[int, int], IncidentSummary]] = {}
        for path in (job / INCIDENTS).glob("*.json"):
            mark = mark_of(path)
            if mark is not None:
                known_entry = self._read.get(path)
                entries_by_path[path] = (
                    known_entry
                    if known_entry and known_entry[0] == mark
                    else (mark, read(path, IncidentSummary))
                )
        self._read = entries_by_path
        summaries = [summary for _, summary in entries_by_path.values()]
        return sorted(summaries, key=lambda summary: (summary.began, summary.incident))


def mark_of(path: Path) -> tuple[int, int] | None:
    """Return a value that differs after a change of the file; None without a file. Raises JobFolderError."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise JobFolderError(f"{path}: it cannot be read ({error.strerror})") from None
    return stat.st_mtime_ns, stat.st_size


def read(path: Path, kind: type[T]) -> T:
    """Read one file of a job. Raises JobFolderError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise JobFolderError(f"{path}: it is larger than {MOST_BYTES >> 20} MiB, and none of ours")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise JobFolderError(f"{path}: it cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobFolderError(f"{path}: it was not written by ttprun of this version ({error})") from None
