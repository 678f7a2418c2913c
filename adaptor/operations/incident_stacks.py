"""Finds the stacks that were written in an incident: `stacks-*/rank<N>.txt` in the log folder.

The file of an incident does not name their folder; the time at which they were written tells.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from adaptor.operations.records import Incident, unix

# The page has the stacks of so many ranks, and so much of each: those of thousands would stall a browser.
MOST_FILES = 8
MOST_BYTES = 16_384
# A file server's clock and a node's may differ so much.
_TOLERANCE_S = 5.0
_NAME = re.compile(r"rank(\d+)(?:\.native)?\.txt")


class Stack(NamedTuple):
    """The content of one file: its path below the log folder, the rank, and its first bytes as text."""

    path: str
    rank: int
    text: str


class Stacks(NamedTuple):
    """The stacks of an incident: those of the ranks to blame first; `left_out` other files are there."""

    shown: list[Stack]
    left_out: int


def of_incident(log_path: Path, incident: Incident) -> Stacks:
    """Return the stacks that were written while the incident lasted; none where they cannot be read."""
    begin, end = unix(incident.began) - _TOLERANCE_S, unix(incident.ended) + _TOLERANCE_S
    stack_files: list[tuple[bool, int, Path]] = []
    suspects = {incident.blamed, *incident.failed, *incident.silent}
    try:
        for path in log_path.glob("stacks-*/rank*.txt"):
            name = _NAME.fullmatch(path.name)
            if name is not None and begin <= path.stat().st_mtime <= end:
                stack_files.append((int(name[1]) not in suspects, int(name[1]), path))
    except OSError:
        return Stacks([], 0)
    stack_files.sort()
    shown = [
        Stack(str(path.relative_to(log_path)), rank, _text(path))
        for _, rank, path in stack_files[:MOST_FILES]
    ]
    return Stacks(shown, max(0, len(stack_files) - MOST_FILES))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            read = file.read(MOST_BYTES + 1)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    omission = "\n... the rest is in the file" if len(read) > MOST_BYTES else ""
    return read[:MOST_BYTES].decode(errors="replace") + omission
