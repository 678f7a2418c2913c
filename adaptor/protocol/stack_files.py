"""The files of stacks, and the signal that asks a worker for its stacks."""

from __future__ import annotations

import signal
from pathlib import Path

# For a worker that does not answer. No framework uses real-time signals, and an agent sends this signal only
# to a process that handles it.
SIGNAL = signal.SIGRTMIN + 13


def folder(log_path: str, generation: str) -> Path:
    """Return the folder of the stacks of a generation's first incident, with `rank<n>.txt` for each rank."""
    return Path(log_path).resolve() / f"stacks-{generation[:8]}"


def of_incident(folder: Path, incident: int) -> Path:
    """Return the folder of the stacks of `incident`; `folder` belongs to the generation's first incident."""
    return folder if incident <= 1 else folder.with_name(f"{folder.name}-{incident}")


def scratch(place: Path, rank: int) -> Path:
    """Return the file in the agent's scratch folder for the stacks of a worker after `SIGNAL`."""
    return place / f"stacks-rank{rank}.txt"
