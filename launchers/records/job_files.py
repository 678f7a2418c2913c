"""Writes the files of a job for operators: `status.json`, `events.jsonl`, `incidents/` (docs/operations.md).

Adds up the uses of time of the job, and measures the durations of steps, from readings of the boards: the
first worker of the controller's node reports its uses of time.

Only the ttprun with the controller writes, in a thread that is started before an incident: a full or silent
disk, or a removed folder, costs only the files.
"""

from __future__ import annotations

import contextlib
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from adaptor import output, text
from adaptor.checkpoint import disk
from adaptor.protocol.board import USES
from adaptor.protocol.records import (
    EVENTS_FILE,
    INCIDENTS,
    STALE_S,
    STATUS_FILE,
    Event,
    IncidentRecord,
    Status,
    StepTimes,
    name_of,
)
from adaptor.verification import transcript
from adaptor.verification.transcript import VerifiedStep

# The event `training` reports a load, because it distinguishes starts from recoveries.
_LOAD = USES.index("load")
_STEPS = "steps"
# Limits of the durations of steps, in seconds: from small models to steps with a save in them.
LIMITS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
# The most incidents whose files are written later, when the disk has room again.
_MOST_LATE = 16
_json = msgspec.json.Encoder()


class TimeUses:
    """The seconds of the successive processes of a rank, in the order of `USES`."""

    def __init__(self) -> None:
        self._before = [0.0] * len(USES)  # of ended processes
        self._last = [0.0] * len(USES)  # of the current process

    def look(self, reading: Sequence[float]) -> None:
        """Take a reading of the board; a smaller reading than before belongs to a new process."""
        if any(seconds_now < last for seconds_now, last in zip(reading, self._last, strict=True)):
            self.begin()
        self._last = list(reading)

    def begin(self) -> None:
        """Expect the next reading from a new process."""
        self._before = [sum(seconds_pair) for seconds_pair in zip(self._before, self._last, strict=True)]
        self._last = [0.0] * len(USES)

    @property
    def load(self) -> float:
        """Return the seconds for which the current process has loaded a checkpoint."""
        return self._last[_LOAD]

    def totals(self) -> dict[str, float]:
        """Return the seconds of all processes by their use, without loads."""
        sums = zip(USES, self._before, self._last, strict=True)
        return {use: seconds_before + last for use, seconds_before, last in sums if use != USES[_LOAD]}


class JobUses:
    """The sum over a whole job, including the sum in status.json before this ttprun had the controller.

    Steps made for the first time are `productive`, repeated steps are `wasted`. So no sum ever decreases.
    Used in the writer's thread.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._before: Mapping[str, float] = {}
        self._written: Mapping[str, float] = {}
        self._divided = StepsMadeAgain()

    def total(
        self, own_uses: Mapping[str, float], step: int | None, generation: int, job: Path
    ) -> dict[str, float]:
        """Return the seconds of the whole job.

        Args:
            own_uses: of this ttprun.
            step: the newest finished step; None: unknown.
            generation: of workers; in each the controller may have come from another node.
        """
        if generation != self._generation:
            self._generation = generation
            uses_before: Mapping[str, float] = {}
            # The first status of a job, or the status of another version.
            with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
                status = msgspec.json.decode((job / STATUS_FILE).read_bytes(), type=Status)
                uses_before = status.spent
                self._divided.look(None, status.step)
            self._before = {
                use: max(0.0, uses_before[use] - self._written.get(use, 0.0)) for use in uses_before
            }
        self._divided.look(own_uses.get(_STEPS, 0.0), step)
        uses = {use: seconds for use, seconds in own_uses.items() if use != _STEPS}
        self._written = {"productive": self._divided.first, "wasted": self._divided.again, **uses}
        return {use: self._before.get(use, 0.0) + seconds for use, seconds in self._written.items()}


class StepsMadeAgain:
    """Divides the seconds of steps into first-time steps and repeated steps.

    Attributes:
        first, again: the seconds of each
    """

    def __init__(self) -> None:
        self.first = 0.0
        self.again = 0.0
        self._seconds = 0.0
        self._step = -1
        self._highest = -1  # the newest step finished before the job went back

    def look(self, seconds: float | None, step: int | None) -> None:
        """Take a reading; steps that end between two readings count as equally long.

        Args:
            seconds: of all steps of this ttprun; None: the step belongs to another ttprun.
            step: the newest finished step; None: unknown.
        """
        if step is None:
            return
        step_before, self._step = self._step, step
        if step < step_before:  # the job has gone back and repeated the steps up to `step`
            self._highest = max(self._highest, step_before)
            share = 1.0
        elif step == step_before:
            share = float(step <= self._highest)
        else:
            share = max(0, min(step, self._highest) - step_before) / (step - step_before)
        if seconds is not None:
            further_s = max(0.0, seconds - self._seconds)
            self._seconds = seconds
            self.again += further_s * share
            self.first += further_s * (1.0 - share)


class StepTimer:
    """The timer of the steps of a job.

    Two readings are further apart than a short step: the steps between two readings count as equally long.
    """

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None  # a step, and the time of its first sight
        self._is_exact = False  # whether the time is the end of the step, as far as readings tell
        self._counts = [0] * (len(LIMITS_S) + 1)
        self._sum = 0.0

    def look(self, step: int, time_now: float, *, counts: bool) -> None:
        """Take a reading.

        Args:
            step: the newest finished step; -1: none.
            time_now: on the monotonic clock.
            counts: whether the job trains; time without training belongs to no step.
        """
        if not counts or step < 0:
            self._last = None
        elif self._last is None or step < self._last[0]:
            # The step may have ended long ago: the duration of the next step is unknown.
            self._last = step, time_now
            self._is_exact = False
        elif step > self._last[0]:
            step_before, at = self._last
            if self._is_exact:
                step_s = (time_now - at) / (step - step_before)
                self._counts[bisect_left(LIMITS_S, step_s)] += step - step_before
                self._sum += time_now - at
            self._last, self._is_exact = (step, time_now), True

    def times(self) -> StepTimes | None:
        """Return the durations so far; None without steps."""
        if not any(self._counts):
            return None
        return StepTimes(limits=list(LIMITS_S), counts=list(self._counts), sum=self._sum)


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
        self._late: dict[str, Callable[[], IncidentRecord]] = {}  # incidents whose files could not be written
        self._uses = JobUses()
        self.job = name_of(job or f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{os.getpid()}")

    @property
    def folder(self) -> Path:
        """Return the folder of the job."""
        return self._log_path / self.job

    def append(self, make: Callable[[], Event]) -> None:
        """Append the event that `make` returns; `make` is called in the writer's thread."""
        self._writer.submit(partial(self._append, make))

    def append_verified(self, verified: VerifiedStep) -> None:
        """Append a verified step to the transcript, in the writer's thread."""
        self._writer.submit(partial(transcript.append, self.folder / transcript.NAME, verified))

    def write_incident(self, make: Callable[[], IncidentRecord]) -> None:
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

    def _write_incident(self, make: Callable[[], IncidentRecord]) -> None:
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
