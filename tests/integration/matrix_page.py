"""The tables of benchmarks/results/layouts.md that the matrix writes."""

from __future__ import annotations

import os
import platform
import runpy
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.faults.harness import Layout
from tests.faults.layouts import CONTEXT, LAYOUTS
from tests.frameworks import prepare
from tests.pages import table, write_section

SURVIVED = "What survives"
IMPOSSIBLE = "What the framework cannot run on a CPU"
_HEAD = ["layout", "precision", "format", "replica", "with the barrier", "with a local copy"]


def write(page: Path, lines: Sequence[dict[str, Any]], trials: Sequence[str], seed: int, faults: int) -> None:
    """Write both sections.

    Args:
        lines: all results, in the order of the runs.
        trials: the names of all trials.
        seed: the seed of the run.
        faults: the faults per combination in the run.
    """
    names = set(trials)
    lines = [line for line in lines if line["trial"] in names]  # some may be there no longer
    latest = {line["trial"]: line for line in lines}
    survived = [line for line in latest.values() if "fault" in line]
    parts = [
        _summary(list(latest.values()), lines, len(trials), seed, faults),
        table(["layout", "processes", "parallel sizes", "more arguments"], _layouts()),
        "Each entry: the fault → the step that was saved. The phases: `PHASES` of `tests/faults/fault.py`.",
        table(_HEAD, _survived(survived)),
    ]
    failed = [
        f"- {line['trial']}: `{_short(line['problem'])}`" for line in latest.values() if line["problem"]
    ]
    if failed:
        parts.append("Failed:\n\n" + "\n".join(failed))
    write_section(page, SURVIVED, "\n\n".join(parts))
    rows = [
        [line["impossible"], f"`{line['arguments']}`", line["because"]]
        for line in latest.values()
        if "impossible" in line
    ]
    introduction = (
        "Each was run without the adaptor, and ended with the error that the last column explains.\n\n"
    )
    write_section(page, IMPOSSIBLE, introduction + table(["layout", "arguments", "why"], rows))


def _summary(
    latest: Sequence[dict[str, Any]], lines: Sequence[dict[str, Any]], trials: int, seed: int, faults: int
) -> str:
    failed = [line for line in latest if line["problem"]]
    repeated = {line["trial"] for line in lines if line["problem"]} - {line["trial"] for line in failed}
    days = sorted({time.strftime("%Y-%m-%d", time.gmtime(line["began"])) for line in latest})
    framework = runpy.run_path(str(prepare.megatron_lm() / "megatron/core/package_info.py"))["__version__"]
    minutes = sum(line["seconds"] for line in lines) / 60
    period = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    counts = f"{len(latest) - len(failed)} of {trials} passed, {len(failed)} failed"
    counts += f", {trials - len(latest)} not run" if len(latest) < trials else ""
    machine = f"Megatron-LM {framework}, Python {platform.python_version()}, torch {torch.__version__}"
    paragraphs = [
        f"    python -m tests.integration.matrix --seed {seed} --faults {faults}",
        f"{period}: {counts}. {minutes:.0f} minutes on {os.cpu_count()} cores. {machine}.",
    ]
    if repeated:
        paragraphs.append("Failed first, and passed when run again: " + "; ".join(sorted(repeated)) + ".")
    return "\n\n".join(paragraphs)


def _layouts() -> list[list[str]]:
    rows = [
        [
            layout.name,
            str(layout.processes),
            _cut(layout),
            f"`{' '.join(layout.extra)}`" if layout.extra else "",
        ]
        for layout in LAYOUTS
    ]
    return [*rows, [CONTEXT.name, "4", "CP2·DP2", "Megatron-core as a library, in our own training loop"]]


def _cut(layout: Layout) -> str:
    parts = {"TP": layout.tp, "PP": layout.pp, "DP": layout.data_parallel_size}
    sizes = "·".join(f"{name}{size}" for name, size in parts.items() if size > 1 or name == "DP")
    return sizes if layout.distributed_optimizer else f"{sizes}, plain DDP"


def _survived(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each layout, precision, format and replica, in the order of the layouts."""
    places = [layout.name for layout in LAYOUTS] + [CONTEXT.name]
    rows: dict[tuple[str, ...], dict[bool, list[str]]] = {}
    for line in sorted(lines, key=lambda line: places.index(line["layout"])):
        key = (line["layout"], line["precision"], line["format"], line["replica"])
        entry = f"{line['fault']} → {line['saved']}"
        rows.setdefault(key, {False: [], True: []})[line["copies"]].append(entry)
    return [
        [*key, *("<br>".join(cells[copies]) or "–" for copies in (False, True))]
        for key, cells in rows.items()
    ]


def _short(problem: str) -> str:
    return problem.splitlines()[0][:200].replace("`", "'")
