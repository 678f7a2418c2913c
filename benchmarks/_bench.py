"""The parts of every benchmark: settings, the machine, a table, and a file in out/benchmarks/.

Importing this module puts the repository's root on the path: a benchmark is started as a file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "benchmarks"
# The number of samples for an interval.
_RESAMPLES = 10_000
sys.path.insert(0, str(ROOT))

from tests import machine  # noqa: E402


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has the docstring of a benchmark as it is written."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest, largest, 90th percentile and number of at least one value."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max": ordered[-1],
        "n": len(ordered),
    }


def bootstrap(draw: Callable[[random.Random], float], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the results of `draw`, each from a sample drawn anew."""
    source = random.Random(seed)
    results = sorted(draw(source) for _ in range(_RESAMPLES))
    return results[int(0.025 * _RESAMPLES)], results[int(0.975 * _RESAMPLES)]


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table whose columns are aligned for a terminal, too."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


class Benchmark:
    """One run of a benchmark: prints its settings at the start, and its findings at the end."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        self._name = name
        self._settings = dict(settings)
        self._machine = machine.describe()
        self._began = time.time()
        description = self._machine
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in settings.items()))
        self.where = machine.line(description)
        print(f"on {self.where}")
        if description["load"] > description["cores"] / 2:
            print(f"the machine is busy (load {description['load']:.1f}): times will be longer than its own")
        sys.stdout.flush()

    def finish(self, text: str, findings: Mapping[str, Any]) -> None:
        """Print the tables in `text`, and write `findings` with settings and machine to a file."""
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
