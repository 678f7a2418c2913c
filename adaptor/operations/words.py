"""The exit codes of the commands of `ttp`, and their common words for people."""

from __future__ import annotations

from adaptor import text
from adaptor.operations.records import Incident, Status, unix

OK, FINDING, USAGE = 0, 1, 2


def shown(raw_text: str) -> str:
    """Return text from a file as a line that any terminal can show."""
    return text.encodable(raw_text.replace("\n", " ").replace("\x1b", "?"))


def protection(status: Status) -> str:
    """Return whether a job is protected, and why not; of an ended job, whether it was protected."""
    if status.protected is None:
        return "never protected" if status.state == "ended" else "not yet protected"
    if status.state == "ended" and status.protected:
        return "it was protected to its end"
    return "protected" if status.protected else f"NOT PROTECTED: {status.why_not}"


def first_step_again(incident: Incident, fault_at: float) -> float | None:
    """Return the seconds from `fault_at`, in Unix seconds, to the next first step; None: none yet."""
    phases = incident.phases
    if phases.first_step is None:
        return None
    spent = max(0.0, unix(incident.ended) - fault_at)
    return spent + (phases.restart or 0.0) + (phases.load or 0.0) + phases.first_step


def duration(seconds: float) -> str:
    """Return a number of seconds in a fitting unit."""
    if 0 < seconds < 0.001:
        return "below 1 ms"
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """Return a number of bytes in a fitting unit."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
