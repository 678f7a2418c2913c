"""Step time with online recovery armed against not armed: `python benchmarks/online_cost.py`.

One job arms and disarms online recovery every few steps (`_arming.py`). So both arms see the same processes,
groups and memory; two separate jobs differ by 2 % and more for no other reason. Neighbouring blocks are a
pair. The figure is the middle of the pairs' ratios (the Hodges-Lehmann estimate: the median of the means of
any two ratios), with the 95 % interval of Wilcoxon's signed ranks.

With two processes for two cores the figure is the cost of a step; with four (`--ranks 4`) processes also wait
for cores. There is no spare process: it would sleep during the steps. The C library keeps freed memory:
otherwise, in some starts, it returns the end of the heap and requests it again in each step, armed or not,
depending on the layout of small objects (`--trim` leaves that behaviour).

`--holders` measures the comparison of the holders (TTP_VERIFY_EVERY=auto) against none instead: online
recovery is armed in both arms. Each block has as many comparisons as the chosen interval says. Drills are
timed before the first block.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _blocks
from _bench import Benchmark, argument_parser, spread, table
from _blocks import Measured, middle, paired
from _job import Job, JobError, add_size_options, model, new_folder, run

TARGET = 1.002
HOLDERS_TARGET = 1.005
# For each number of ranks: pairs of blocks that take some five, and some two and a half, minutes in all.
PAIRS = {2: 360, 4: 110}
# Steps before the first block.
WARM_UP = 60
# Of glibc: more than these jobs free in a step.
KEEPS_FREED_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
RATIOS = (("wall", "wall time"), ("cpu", "CPU time"), ("main", "CPU time of the main thread"))
COUNTS = (("switches", "context switches"), ("faults", "page faults"))
_LIMIT_S = 3600.0


def measure(ranks: int, pairs: int, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a job of so many ranks; return the records of each block and of drills."""
    measured_kind = "holders" if options.holders else "times"
    job = Job(
        folder,
        adaptor=True,
        train_iters=WARM_UP + 2 * pairs * options.block + 1,
        ranks=ranks,
        extra=[
            *model(options.layers, options.hidden, options.sequence),
            *("--global-batch-size", str(options.global_batch)),
        ],
        arming=f"{options.block},{pairs},{options.seed},{WARM_UP},{measured_kind}",
        environment={
            "TTP_ONLINE": "60",
            "TTP_SPARES": "0",
            "TTP_HANG": "0",
            **({} if options.trim else KEEPS_FREED_MEMORY),
            **({"TTP_VERIFY_EVERY": "auto"} if options.holders else {}),
        },
    )
    with job:
        code = job.wait(_LIMIT_S)
    if code != 0:
        raise JobError(f"{ranks} ranks: exit code {code}: see {job.log}")
    lines = job.watched()
    if options.holders:  # whose blocks may be longer than was asked for
        print(re.findall(r"^.*TTP_VERIFY_EVERY=auto.*$", job.log.read_text(), re.MULTILINE)[-1])
    elif len(lines) != 2 * pairs * ranks:
        raise JobError(
            f"{ranks} ranks: {len(lines)} of {2 * pairs * ranks} blocks were written down: see {job.log}"
        )
    return lines


def summary(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Any]:
    """Return the figures of a job: of each measure the disarmed step, the addition by arming, and the
    ratio.
    """
    figures: dict[str, Any] = {}
    for key, _ in RATIOS:
        figures[key] = {
            "off": statistics.median(off[key] for off, _ in pairs),
            "added": middle([on[key] - off[key] for off, on in pairs]),
            # Of logarithms: a ratio and its reciprocal are as far from 1.
            "ratio": [
                math.exp(logarithm)
                for logarithm in middle([math.log(on[key] / off[key]) for off, on in pairs])
            ],
        }
    for key, _ in COUNTS:
        figures[key] = {
            "off": statistics.median(off[key] for off, _ in pairs),
            "added": middle([on[key] - off[key] for off, on in pairs]),
        }
    return figures


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", choices=tuple(PAIRS), default=list(PAIRS))
    parser.add_argument("--pairs", type=int, help=f"pairs of blocks in each job (default: {PAIRS}, by ranks)")
    _blocks.add_options(parser)
    parser.add_argument("--holders", action="store_true", help="the comparison of holders, in its place")
    parser.add_argument("--trim", action="store_true", help="the C library gives freed memory back")
    add_size_options(parser)
    options = parser.parse_args()
    benchmark = Benchmark("online_cost", vars(options))
    folder = new_folder("online_cost")
    blocks = {}
    for ranks in options.ranks:
        print(f"{ranks} processes", flush=True)
        blocks[ranks] = measure(ranks, options.pairs or PAIRS[ranks], folder / str(ranks), options)
    shutil.rmtree(folder)
    pairs = {
        ranks: paired([line for line in written if line["what"] == "block"])
        for ranks, written in blocks.items()
    }
    if not all(pairs.values()):
        raise JobError("no pair of blocks fits into the steps: use more --pairs")
    figures_by_ranks = {
        ranks: {"summary": summary(of_job), "pairs": of_job} for ranks, of_job in pairs.items()
    }
    summaries = {ranks: result["summary"] for ranks, result in figures_by_ranks.items()}
    target = HOLDERS_TARGET if options.holders else TARGET
    text = f"{report(summaries)}\n\n{verdict(summaries, target)}"
    for ranks, written in blocks.items():
        drills = [line for line in written if line["what"] == "drill"]
        if drills:
            took = spread([1000 * line["seconds"] for line in drills])
            text += (
                f"\n{ranks} processes: a drill took {took['median']:.2f} ms (at most {took['max']:.2f}),"
                f" {sum(not line['problem'] for line in drills)} of {len(drills)} without a problem"
            )
    benchmark.finish(text, {"target": target, "jobs": figures_by_ranks})


def report(figures_by_ranks: dict[int, dict[str, Any]]) -> str:
    """The table."""
    rows = []
    for ranks, figures in figures_by_ranks.items():
        for key, name in RATIOS:
            ratio, low, high = figures[key]["ratio"]
            added = "{:+.3f} ({:+.3f} to {:+.3f})".format(*figures[key]["added"])
            rows.append(
                [
                    ranks,
                    f"{name}, ms",
                    f"{figures[key]['off']:.2f}",
                    added,
                    f"{ratio:.4f} ({low:.4f} to {high:.4f})",
                ]
            )
        for key, name in COUNTS:
            added = "{:+.1f} ({:+.1f} to {:+.1f})".format(*figures[key]["added"])
            rows.append([ranks, name, f"{figures[key]['off']:.1f}", added, ""])
    return table(["processes", "of a step", "off", "added (95 %)", "on ÷ off (95 %)"], rows)


def verdict(figures_by_ranks: dict[int, dict[str, Any]], target: float) -> str:
    """Return of each job whether the ratio of step times is small enough, as far as it is known."""
    lines = []
    for ranks, figures in figures_by_ranks.items():
        ratio, low, high = figures["wall"]["ratio"]
        outcome = "MISSED" if low > target else "reached" if high <= target else "not known: use more pairs"
        if outcome.startswith("not"):
            outcome = f"{'reached' if ratio <= target else 'MISSED'} by the middle, {outcome}"
        lines.append(f"{ranks} processes: on / off {ratio:.4f}, at most {target:g}: {outcome}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
