"""The cost of a step, part by part, with a process on each core: `python benchmarks/step_parts.py`.

One job of two processes, each pinned to a core, turns the adaptor off and on every few steps (`_parts.py`).
So both arms see the same machine, process groups and memory, and neighbouring blocks are a pair: the figure
is the middle of the pairs' ratios (the Hodges-Lehmann estimate: the median of the means of any two ratios),
with the 95 % interval of Wilcoxon's signed ranks. Blocks are short, so that phases in which a machine is
faster count for little. The parts are the adaptor's own work on the main thread; "elsewhere" is the rest of
the difference: caches emptied by the parts, other threads, and ranks that wait for each other in the
framework's collectives instead of in a part. Only `step_cost.py` measures the patches themselves, and groups
that the framework alone would not have.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _blocks
from _bench import Benchmark, argument_parser, table
from _blocks import WARM_UP, middle, paired
from _job import Job, JobError, add_size_options, model, new_folder, run
from _parts import PARTS

RANKS = 2
RESOLUTION = 0.005
# What a step took, by meter, by part and for "all".
Block = dict[str, dict[str, float]]
_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Row:
    """A layout with its replica; `distributed`: whether its optimizer is distributed."""

    name: str
    environment: Mapping[str, str]
    distributed: bool = True


ROWS = (
    Row("split", {"TTP_REPLICA": "split"}),
    Row("split, local copy", {"TTP_REPLICA": "split", "TTP_LOCAL_COPY": "True"}),
    Row("mirror", {"TTP_REPLICA": "mirror"}),
    Row("mirror, local copy", {"TTP_REPLICA": "mirror", "TTP_LOCAL_COPY": "True"}),
    Row("none", {"TTP_REPLICA": "none"}),
    Row("whole optimizer", {}, distributed=False),
)


def measure(row: Row, folder: Path, options: argparse.Namespace) -> list[tuple[Block, Block]]:
    """Run the job of a row.

    Returns:
        Pairs of (off, on), each the mean over ranks of what a step took (`_parts.py`).
    """
    steps = WARM_UP + 2 * options.pairs * options.block + 1
    job = Job(
        folder,
        adaptor=True,
        train_iters=steps,
        ranks=RANKS,
        distributed=row.distributed,
        extra=[
            *model(options.layers, options.hidden, options.sequence),
            *("--global-batch-size", str(options.global_batch)),
        ],
        parts=f"{options.block},{options.pairs},{options.seed}",
        environment={**row.environment, "TTP_HANG": "0"},
    )
    with job:
        code = job.wait(_LIMIT_S)
    if code != 0:
        raise JobError(f"{row.name}: exit code {code}: see {job.log}")
    pairs = paired(job.watched())
    if len(pairs) != options.pairs:
        raise JobError(f"{row.name}: {len(pairs)} of {options.pairs} pairs were written down: see {job.log}")
    return pairs


def summary(pairs: Sequence[tuple[Block, Block]]) -> dict[str, Any]:
    """The figures of a row: ratio and interval of wall and CPU time, and medians over pairs."""
    figures: dict[str, Any] = {}
    for key in ("wall", "cpu"):
        # Of logarithms: a ratio and its reciprocal are as far from 1.
        ratio, *limits = map(
            math.exp, middle([math.log(on[key]["all"] / off[key]["all"]) for off, on in pairs])
        )
        figures[key] = {
            "off": statistics.median(off[key]["all"] for off, _ in pairs),
            "added": added(pairs, key),
            "ratio": ratio,
            "interval": limits,
            "parts": parts_of(pairs, key),
        }
    for key in ("switches", "faults", "collectives"):
        figures[key] = added(pairs, key)
    figures["calls"] = parts_of(pairs, "calls")
    return figures


def added(pairs: Sequence[tuple[Block, Block]], meter: str) -> float:
    """The middle over pairs of what a step takes more."""
    return middle([on[meter]["all"] - off[meter]["all"] for off, on in pairs])[0]


def parts_of(pairs: Sequence[tuple[Block, Block]], meter: str) -> dict[str, float]:
    """The median over pairs of what each part takes."""
    return {part: statistics.median(on[meter][part] for _, on in pairs) for part in PARTS}


def main() -> None:
    parser = argument_parser(__doc__)
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="ROW", help=str(names))
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks, one off and one on")
    _blocks.add_options(parser, block=3)
    add_size_options(parser)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < RANKS:
        parser.error(f"{len(os.sched_getaffinity(0))} core may be used here: {RANKS} processes need one each")
    benchmark = Benchmark("step_parts", vars(options))
    folder = new_folder("step_parts")
    summaries = {}
    for number, row in enumerate(ROWS):
        if row.name in options.only:
            print(row.name, flush=True)
            pairs = measure(row, folder / str(number), options)
            summaries[row.name] = summary(pairs)
    shutil.rmtree(folder)
    benchmark.finish(report(summaries), {"rows": summaries})


def report(summaries: Mapping[str, Any]) -> str:
    """Return the tables: the ratios, and the addition of each part."""
    rows = []
    for name, figures in summaries.items():
        wall, cpu = figures["wall"], figures["cpu"]
        half = (wall["interval"][1] - wall["interval"][0]) / 2
        precision = f"±{100 * half:.2f} %" + ("" if half <= RESOLUTION else ": too coarse")
        rows.append(
            [
                name,
                f"{wall['off']:.1f}",
                f"{wall['ratio']:.4f} ({wall['interval'][0]:.4f} to {wall['interval'][1]:.4f}, {precision})",
                f"{cpu['off']:.1f}",
                f"{cpu['ratio']:.4f} ({cpu['interval'][0]:.4f} to {cpu['interval'][1]:.4f})",
                *(f"{figures[key]:+.1f}" for key in ("collectives", "switches", "faults")),
            ]
        )
    head = ["", "off, ms", "on / off (95 %)", "CPU, off, ms", "CPU, on / off (95 %)"]
    text = table([*head, "collectives", "context switches", "page faults"], rows)
    for key, title in (("wall", "wall time"), ("cpu", "CPU time")):
        lines = [
            [part, *(f"{figures[key]['parts'][part]:.3f}" for figures in summaries.values())]
            for part in PARTS
        ]
        sums = [figures[key]["added"] - sum(figures[key]["parts"].values()) for figures in summaries.values()]
        lines.append(["elsewhere", *(f"{value:.3f}" for value in sums)])
        lines.append(["the difference", *(f"{figures[key]['added']:.3f}" for figures in summaries.values())])
        text += "\n\n" + table([f"{title} that a step adds, ms", *summaries], lines)
    return text


if __name__ == "__main__":
    run(main)
