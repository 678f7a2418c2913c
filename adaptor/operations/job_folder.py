"""The folder of a job below TTP_LOG_PATH, and what is read from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

from adaptor.errors import AdaptorError
from adaptor.operations.records import Incident, Status

STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
INCIDENTS = "incidents"
# What a name of a folder is made of where it is shown, and where it goes into a file of ours.
_UNUSUAL = re.compile(r"[^\w.@+=,-]+")
# A file that is larger is none of ours: the report of 100,000 ranks has 200 MiB.
MOST_BYTES = 1 << 30

T = TypeVar("T", Status, Incident)


class JobFolderError(AdaptorError):
    """The files of a job cannot be read."""


def name_of(job: str) -> str:
    """Return the name of the folder of a job, of the id that its user gave it."""
    return _UNUSUAL.sub("_", job).strip(".") or "_"


def jobs(log_path: Path) -> list[Path]:
    """Return the folders of jobs in `log_path`, the one whose status is newest last.

    Raises:
        JobFolderError: `log_path` cannot be read.
    """
    try:
        found = [path for path in log_path.iterdir() if (path / STATUS_FILE).is_file()]
        return sorted(found, key=lambda path: (path / STATUS_FILE).stat().st_mtime)
    except OSError as error:
        raise JobFolderError(f"{log_path}: the folder cannot be read ({error.strerror})") from None


def find(where: Path) -> Path:
    """Return the folder of a job: `where` itself, or the newest one in it.

    Raises:
        JobFolderError: it is neither.
    """
    if (where / STATUS_FILE).is_file():
        return where
    found = jobs(where)
    if not found:
        raise JobFolderError(
            f"{where}: no job has written here; name a TTP_LOG_PATH, or a job's folder in it"
        )
    return found[-1]


def status(job: Path) -> Status:
    """Read status.json. Raises JobFolderError."""
    return _read(job / STATUS_FILE, Status)


def incidents(job: Path) -> list[Incident]:
    """Read the files of all incidents that have ended, in their order. Raises JobFolderError."""
    found = [_read(path, Incident) for path in (job / INCIDENTS).glob("*.json")]
    return sorted(found, key=lambda incident: (incident.began, incident.incident))


def _read(path: Path, kind: type[T]) -> T:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise JobFolderError(f"{path}: it is larger than {MOST_BYTES >> 20} MiB, and none of ours")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise JobFolderError(f"{path}: it cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise JobFolderError(f"{path}: it was not written by ttprun of this version ({error})") from None
