"""Step time with online recovery armed against not armed: `python benchmarks/online_cost.py`.

One job arms and disarms it every few steps (`_arming.py`). So both arms see the same processes, groups and
memory: two jobs, of which one is armed, differ by 2 % and more for no other reason than that they are two.
Neighbouring blocks are a pair. The figure is the middle of the pairs' ratios (the Hodges-Lehmann estimate:
the median of the means of any two of them), with the 95 % interval that belongs to Wilcoxon's signed ranks.

With two processes for two cores it is the cost of a step; with four (`--ranks 4`) processes wait for cores,
too. No spare process waits, of which the steps of a job have nothing: it sleeps. The C library keeps memory
that was freed: else it gives the end of the heap back in some starts, and asks for it again in each step,
armed or not, as the layout of small things in memory has it (`--trim` leaves that as it is).

`--holders` measures the comparison of the holders (TTP_VERIFY_EVERY=auto) against none, instead: online
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
    """Run a job of so many ranks; return what its ranks have written down of each block, and of drills."""
    what = "holders" if options.holders else "times"
    job = Job(
        folder,
        adaptor=True,
        train_iters=WARM_UP + 2 * pairs * options.block + 1,
        ranks=ranks,
        extra=[
            *model(options.layers, options.hidden, options.sequence),
            *("--global-batch-size", str(options.global_batch)),
        ],
        arming=f"{options.block},{pairs},{options.seed},{WARM_UP},{what}",
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
    found = job.watched()
    if options.holders:  # whose blocks may be longer than was asked for
        print(re.findall(r"^.*TTP_VERIFY_EVERY=auto.*$", job.log.read_text(), re.MULTILINE)[-1])
    elif len(found) != 2 * pairs * ranks:
        raise JobError(
            f"{ranks} ranks: {len(found)} of {2 * pairs * ranks} blocks were written down: see {job.log}"
        )
    return found


def summary(pairs: Sequence[tuple[Measured, Measured]]) -> dict[str, Any]:
    """The figures of a job: of each measure what a step takes disarmed, what arming adds, and the ratio."""
    made: dict[str, Any] = {}
    for key, _ in RATIOS:
        made[key] = {
            "off": statistics.median(off[key] for off, _ in pairs),
            "added": middle([on[key] - off[key] for off, on in pairs]),
            # Of logarithms: a ratio and its reciprocal are as far from 1.
            "ratio": [math.exp(one) for one in middle([math.log(on[key] / off[key]) for off, on in pairs])],
        }
    for key, _ in COUNTS:
        made[key] = {
            "off": statistics.median(off[key] for off, _ in pairs),
            "added": middle([on[key] - off[key] for off, on in pairs]),
        }
    return made


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
    found = {ranks: {"summary": summary(of_job), "pairs": of_job} for ranks, of_job in pairs.items()}
    made = {ranks: one["summary"] for ranks, one in found.items()}
    target = HOLDERS_TARGET if options.holders else TARGET
    text = f"{report(made)}\n\n{verdict(made, target)}"
    for ranks, written in blocks.items():
        drills = [line for line in written if line["what"] == "drill"]
        if drills:
            took = spread([1000 * line["seconds"] for line in drills])
            text += (
                f"\n{ranks} processes: a drill took {took['median']:.2f} ms (at most {took['max']:.2f}),"
                f" {sum(not line['problem'] for line in drills)} of {len(drills)} without a problem"
            )
    benchmark.finish(text, {"target": target, "jobs": found})


def report(found: dict[int, dict[str, Any]]) -> str:
    """The table."""
    rows = []
    for ranks, one in found.items():
        for key, name in RATIOS:
            ratio, low, high = one[key]["ratio"]
            added = "{:+.3f} ({:+.3f} to {:+.3f})".format(*one[key]["added"])
            rows.append(
                [
                    ranks,
                    f"{name}, ms",
                    f"{one[key]['off']:.2f}",
                    added,
                    f"{ratio:.4f} ({low:.4f} to {high:.4f})",
                ]
            )
        for key, name in COUNTS:
            added = "{:+.1f} ({:+.1f} to {:+.1f})".format(*one[key]["added"])
            rows.append([ranks, name, f"{one[key]['off']:.1f}", added, ""])
    return table(["processes", "of a step", "off", "added (95 %)", "on ÷ off (95 %)"], rows)


def verdict(found: dict[int, dict[str, Any]], target: float) -> str:
    """Return of each job whether the ratio of step times is small enough, as far as it is known."""
    lines = []
    for ranks, one in found.items():
        ratio, low, high = one["wall"]["ratio"]
        known = "MISSED" if low > target else "reached" if high <= target else "not known: use more pairs"
        if known.startswith("not"):
            known = f"{'reached' if ratio <= target else 'MISSED'} by the middle, {known}"
        lines.append(f"{ranks} processes: on / off {ratio:.4f}, at most {target:g}: {known}")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
