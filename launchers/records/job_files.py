"""Writes the files of a job for operators: `status.json`, `events.jsonl` and `incidents/`
(docs/operations.md).

Only the ttprun with the controller writes, in a thread that is started before an incident: a full or silent
disk, or a removed folder, costs only the files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from adaptor import output, text
from adaptor.checkpoint import disk
from adaptor.launchers.records.time_uses import JobUses
from adaptor.protocol.records import (
    EVENTS_FILE,
    INCIDENTS,
    STALE_S,
    STATUS_FILE,
    Event,
    Incident,
    Status,
    name_of,
)

# The most incidents whose files are written later, when the disk has room again.
_MOST_LATE = 16

_json = msgspec.json.Encoder()


class JobFiles:
    """The files of one job.

    Args:
        log_path: TTP_LOG_PATH.
        job: the job id given by the user; '' without one.
        patience_s: seconds after which the user is told about an unwritten status.
    """

    def __init__(self, log_path: str, job: str = "", patience_s: float = STALE_S) -> None:
        self._log_path = Path(log_path).absolute()
        self._writer = output.Writer("ttp-report")
        self._writer.start()
        self._patience_s = patience_s
        self._status_waits = False
        self._waits_since = 0.0  # on the monotonic clock
        self._has_gap = False  # whether the user was told about unwritten files
        self._late: dict[str, Callable[[], Incident]] = {}  # incidents whose files could not be written
        self._uses = JobUses()
        self.job = name_of(job or f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}")

    @property
    def folder(self) -> Path:
        """Return the folder of the job."""
        return self._log_path / self.job

    def append(self, make: Callable[[], Event]) -> None:
        """Append the event that `make` returns; `make` is called in the writer's thread."""
        self._writer.submit(partial(self._append, make))

    def write_incident(self, make: Callable[[], Incident]) -> None:
        """Write or rewrite the file of the incident that `make` returns, in the writer's thread."""
        self._writer.submit(partial(self._write_incident, make))

    def write_status(self, status: Status, *, always: bool = False) -> None:
        """Replace status.json; without `always` only if no status is waiting."""
        time_now = time.monotonic()
        if always or not self._status_waits:
            self._waits_since = time_now
            self._status_waits = True  # before `submit`: the thread may write at once
            if not self._writer.submit(partial(self._write_status, status)):
                self._status_waits = False
        elif time_now - self._waits_since >= self._patience_s:
            self._tell_gap("the disk does not answer")

    def calculate(self, work: Callable[[], None]) -> None:
        """Call `work` in the writer's thread: a long calculation for people."""
        self._writer.submit(work)

    def incident_path(self, incident: str) -> Path:
        """Return the path of the file with the id `incident`."""
        return self.folder / INCIDENTS / f"{incident}.json"

    def close(self) -> None:
        """Wait for pending writes for a bounded time."""
        self._writer.close()

    def _tell_gap(self, reason: str) -> None:
        """Tell the user once about unwritten files, until a file is written again."""
        if not self._has_gap:
            self._has_gap = True
            output.tell(
                f"[ttp] {self.folder}: the status of the job cannot be written ({reason}); the job goes "
                "on, and"
                " what ttp and the metrics say of it is old"
            )

    # in the writer's thread

    def _append(self, make: Callable[[], Event]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        # One appending write: another node, or a restarted job with the same id, may append, too.
        with (self.folder / EVENTS_FILE).open("ab", buffering=0) as file:
            file.write(_json.encode(make()) + b"\n")

    def _write_incident(self, make: Callable[[], Incident]) -> None:
        name = ""
        try:
            incident = make()
            name = incident.id
            _replace(self.incident_path(name), msgspec.json.format(_json.encode(incident), indent=1))
            self._late.pop(name, None)
        except Exception as error:  # the file is for people, who were told its path
            if name not in self._late:
                output.tell(f"[ttp] the incident report cannot be written: {text.describe(error)}")
            if isinstance(error, OSError) and len(self._late) < _MOST_LATE:
                self._late[name] = make

    def _write_status(self, status: Status) -> None:
        try:
            spent = self._uses.total(status.spent, status.step, status.generation, self.folder)
            status = msgspec.structs.replace(status, spent=spent)
            _replace(self.folder / STATUS_FILE, msgspec.json.format(_json.encode(status), indent=1))
        except OSError as error:
            self._tell_gap(error.strerror or text.describe(error))
            return
        finally:
            self._status_waits = False
        if self._has_gap:
            self._has_gap = False
            output.tell(f"[ttp] {self.folder}: the status of the job is written again")
        for make in list(self._late.values()):
            self._write_incident(make)


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)  # the folder may have been removed
    disk.replace(path.parent, path.name, data, durable=False)
