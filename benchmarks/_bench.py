"""What every benchmark prints and keeps: its settings, the machine, a table, and a file in out/benchmarks/.

Importing it puts the repository's root on the path: a benchmark is started as a file.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "benchmarks"
sys.path.insert(0, str(ROOT))


def machine() -> dict[str, Any]:
    """The machine and the versions; `load` is the load average of the last minute, before the benchmark."""
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


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest, 90th percentile and number of `values`; there must be at least one."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max": ordered[-1],
        "n": len(ordered),
    }


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table, its columns aligned for a terminal, too."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


class Benchmark:
    """One run of one benchmark: says with what it begins, and at the end what it found."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._settings = dict(settings)
        self._machine = machine()
        self._began = time.time()
        where = self._machine
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))
        self.where = (
            f"{where['cores']} × {where['cpu']}, {where['memory_gib']} GiB, Linux {where['kernel']}, "
            f"Python {where['python']}, torch {where['torch']}"
        )
        print(f"on {self.where}")
        if where["load"] > where["cores"] / 2:
            print(f"the machine is busy (load {where['load']:.1f}): times will be longer than its own")
        sys.stdout.flush()

    def finish(self, text: str, findings: Mapping[str, Any]) -> None:
        """Print the tables in `text`, keep `findings` beside settings and machine."""
        OUT.mkdir(parents=True, exist_ok=True)
        path = OUT / f"{self._name}.json"
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(
            json.dumps(
                {
                    "benchmark": self._name,
                    "settings": self._settings,
                    "machine": self._machine,
                    "began": self._began,
                    "seconds": time.time() - self._began,
                    **findings,
                },
                indent=1,
                default=str,
            )
        )
        scratch.replace(path)
        print(f"\n{text}\n\nkept in {path.relative_to(ROOT)}", flush=True)
