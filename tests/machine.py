"""The machine and the versions on which something was measured or run."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Return the machine and the versions; `load` is the load average of the last minute."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "load": os.getloadavg()[0],
    }


def line(machine: Mapping[str, Any]) -> str:
    """Return the machine in one line for a page."""
    return (
        f"{machine['cores']} × {machine['cpu']}, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"Python {machine['python']}, torch {machine['torch']}"
    )
