"""What a step does more, counted part by part: `python benchmarks/step_counts.py`.

As in `step_parts.py`, one job turns the adaptor off and on every few steps. Here nothing is timed: bytes,
collectives, allocations and so on are the same on a busy machine, and with more processes than cores. Parts
and "elsewhere" (in the framework's own work, and in other threads) sum to the difference between on and off.

bytes sent        given to TCP connections, by all threads; a part has what was sent while it ran
messages          sent to one rank by the main thread; what is in a collective is not counted
allocations       of tensors, on the main thread, with their bytes
Python            bytes of objects that are there at most while a part runs, parts in it included, more than
                  where it began; it does not sum
context switches  of the main thread, voluntary ones: it waits
instructions      of the main thread in user space; only where the machine has a counter of them

All are means over ranks, and medians over pairs of blocks.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
from collections.abc import Sequence
from typing import Any

import _blocks
from _bench import Benchmark, table
from _counters import why_no_instructions
from _job import add_size_options, new_folder, run
from _parts import PARTS
from step_parts import ROWS, Block, Row, added, measure, parts_of

# Meters of `_part_counts.py`, with the heads of their columns.
METERS = {
    "calls": "calls",
    "instructions": "instructions",
    "collectives": "collectives",
    "messages": "messages",
    "sent": "bytes sent",
    "allocations": "allocations",
    "allocated": "bytes allocated",
    "python": "Python, bytes at most",
    "switches": "context switches",
}
_REPLICAS = {row.name: row for row in ROWS}
_CUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "dp2": (2, ()),
    "dp4": (4, ()),
    "tp2-dp2": (4, ("--tensor-model-parallel-size", "2")),
    "pp2-dp2": (4, ("--pipeline-model-parallel-size", "2")),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option, names in (("--layouts", list(_CUTS)), ("--replicas", list(_REPLICAS))):
        parser.add_argument(
            option, nargs="*", choices=names, default=names, metavar="NAME", help=", ".join(names)
        )
    parser.add_argument("--online", action="store_true", help="with online recovery armed, off and on")
    parser.add_argument("--pairs", type=int, default=6, help="pairs of blocks, one off and one on")
    _blocks.add_options(parser)
    add_size_options(parser)
    options = parser.parse_args()
    benchmark = Benchmark("step_counts", vars(options))
    without = why_no_instructions()
    if without:
        print(f"instructions are not counted: this machine has no counter of them ({without})", flush=True)
    folder = new_folder("step_counts")
    found: dict[str, dict[str, Any]] = {}
    for layout in options.layouts:
        ranks, extra = _CUTS[layout]
        for name in options.replicas:
            known = _REPLICAS[name]
            environment = {**known.environment, **({"TTP_ONLINE": "60"} if options.online else {})}
            row = Row(f"{layout}, {name}", environment, known.distributed, ranks, extra)
            print(row.name, flush=True)
            pairs = measure(row, folder / str(len(found)), options, "counts")
            found[row.name] = {meter: counted(pairs, meter) for meter in METERS if meter in pairs[0][0]}
    shutil.rmtree(folder)
    benchmark.finish(report(found), {"rows": found})


def counted(pairs: Sequence[tuple[Block, Block]], meter: str) -> dict[str, float]:
    """What a step has of a meter: without the adaptor ("off"); more with it: by part, "elsewhere", "all"."""
    parts = parts_of(pairs, meter)
    if "all" not in pairs[0][0][meter]:
        return parts
    difference = added(pairs, meter)
    return {
        "off": statistics.median(off[meter]["all"] for off, _ in pairs),
        **parts,
        "elsewhere": difference - sum(parts.values()),
        "all": difference,
    }


def report(found: dict[str, dict[str, Any]]) -> str:
    """The table: a line for each part of each layout with its replica."""
    lines = []
    for name, meters in found.items():
        called = [part for part in PARTS if meters["calls"][part]]
        keys = {"off": "a step, off", **dict(zip(called, called, strict=True))}
        keys |= {"elsewhere": "elsewhere", "all": "the difference"}
        for place, (key, shown) in enumerate(keys.items()):
            cells = [_cell(meters[meter].get(key)) for meter in meters]
            lines.append([name if place == 0 else "", shown, *cells])
    heads = [METERS[meter] for meter in next(iter(found.values()))]
    return table(["layout, replica", "part", *heads], lines)


def _cell(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:.1f}"


if __name__ == "__main__":
    run(main)
