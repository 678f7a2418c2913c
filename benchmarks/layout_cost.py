"""Cost of protection in each layout: memory, bytes sent, step time: `python benchmarks/layout_cost.py`.

For each layout and replica the jobs of step_cost.py take turns. Besides the step time:

memory  of a rank between two steps: the bytes of all tensors, and all memory of the process without a file
bytes   on the loopback during a block of steps: all traffic of gloo, with the headers. If permitted, the
        benchmark moves into its own network namespace, so that other traffic is not counted. The bytes that
        `split` sends between the optimizer instances are also counted in the calls

The counterpart of a job is the unmodified framework: for `split` with two optimizer instances of its own,
else with one instance. Step times are compared with the counterpart, memory and bytes also with one instance.
In brackets are the values of the design's table: for N parameters on d ranks 12·N/d bytes of memory, and
8·N/d bytes to send with `split`; with `mirror` 4·N/d bytes more memory, and as many to send; with
TTP_LOCAL_COPY 12 bytes for each parameter that a rank updates.

With `--only` the other layouts keep the rows of an earlier run. `--only` without names runs nothing and
writes the existing rows.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import OUT, Benchmark, argument_parser, table
from _job import JobError, model, new_folder, run
from step_cost import TARGETS, Race, interval, one_start

from tests.faults.harness import DP2_WHOLE, DP3, DP4, MOE_EP2, PP2_DP2, TP2_DP2, Layout
from tests.faults.layouts import replicas
from tests.pages import write_section

LAYOUTS = (DP4, DP3, TP2_DP2, PP2_DP2, MOE_EP2, DP2_WHOLE)
# The one that the targets are for; with it, local copies are measured, too.
MAIN = DP4
SECTION = "What it costs"
WHY = (
    "Memory and bytes are compared with the unmodified framework with one optimizer instance; the columns "
    "of the counterpart, and the step time, with `split` against the framework's own two instances. In "
    "brackets: the formulas of [costs.md](costs.md). Over gloo torch runs a reduce-scatter as an "
    "all-reduce, which sends twice as much. The groups of `split` are smaller, so it may send less in all "
    "than one instance. With experts the framework gathers all parameters after each of its optimizers, "
    "the adaptor once: what that saves is subtracted from what `mirror` sends."
)
MISSED = (
    "The targets are for steps of about half a second and more (README, Measured). The added time does not "
    "shrink with the step: here {ranks} processes share {cores} cores, and {low:.0f} to {high:.0f} ms are a "
    "larger part of a step of {shortest:.0f} to {longest:.0f} ms."
)
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Row:
    """A row of the table: a layout with its setting for the replica."""

    family: str
    layout: Layout
    replica: str
    copies: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}, {self.replica}" + (", local copy" if self.copies else "")


def rows() -> list[Row]:
    """Return all rows; for each layout first those whose counterpart has one optimizer instance."""
    all_rows = []
    for layout in LAYOUTS:
        for replica, cut in sorted(replicas(layout)):
            all_rows.append(Row(layout.name, cut, replica))
            if layout is MAIN:
                all_rows.append(Row(layout.name, cut, replica, copies=True))
    return all_rows


def alone_on_the_network() -> bool:
    """Move into a network namespace of our own, if that is allowed."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET) != 0:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def _busy() -> float:
    """The cores that are in use while no job of ours runs, in the mean of a second."""

    def idle() -> int:
        _, _, _, _, idle, iowait, *_ = Path("/proc/stat").read_text().split()
        return int(idle) + int(iowait)

    idle_before, began = idle(), time.monotonic()
    time.sleep(1.0)
    free = (idle() - idle_before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    return max(0.0, (os.cpu_count() or 1) - free)


def measure(row: Row, folder: Path, options: argparse.Namespace, source: random.Random) -> dict[str, Any]:
    """Run both jobs of a row; the figures of each, for a rank of the mean."""
    layout = row.layout
    cut = ("--tensor-model-parallel-size", str(layout.tp))
    race = Race(
        options.pairs,
        options.block,
        instances=2 if row.replica == "split" else 1,
        alike=True,
        extra=[*model(options.layers, options.hidden, options.sequence), *cut, *layout.arguments],
        environment={"TTP_REPLICA": layout.replica, "TTP_LOCAL_COPY": str(row.copies)},
        ranks=layout.processes,
        distributed=layout.distributed_optimizer,
        cost=True,
    )
    busy_share = _busy()
    measured = one_start(folder, race, source)
    ratios = [on / off for off, on in zip(measured["off"], measured["on"], strict=True)]
    sent = measured["sent"]
    arms = {arm: _figures(measured["watched"][arm], statistics.median(sent[arm]), layout) for arm in sent}
    return {
        **arms,
        "ratio": statistics.median(ratios),
        "interval": interval(ratios, options.seed),
        "milliseconds": 1000 * statistics.median(measured["off"]),
        "compared": measured["compared"],
        "sent": sent,
        "others": busy_share,
        "at": time.strftime("%Y-%m-%d %H:%M"),
    }


def _figures(watched: list[dict[str, Any]], sent: float, layout: Layout) -> dict[str, Any]:
    ranks = [line for line in watched if line["what"] == "cost"]
    if len(ranks) != layout.processes:
        raise JobError(f"{len(ranks)} of {layout.processes} ranks said what they take")
    mean = {key: statistics.mean(line[key] for line in ranks) for key in ("tensors", "anonymous", "between")}
    shard = statistics.mean(
        line["dense"] / line["sharing_dense"] + line["experts"] / line["sharing_experts"] for line in ranks
    )
    return {**mean, "shard": shard, "sent": sent / layout.processes}


def by_design(row: Row, shard: float) -> tuple[float, float]:
    """Return the design's values: more memory and more bytes to send, for parameters divided among d
    ranks.
    """
    memory = {"split": 12 * shard, "mirror": 16 * shard, "none": 0.0}[row.replica]
    # With either replica a rank updates two shards: one that is twice as long, or its neighbour's, too.
    memory += 24 * shard if row.copies else 0.0
    return memory, {"split": 8 * shard, "mirror": 4 * shard, "none": 0.0}[row.replica]


def line(row: Row, figures: Mapping[str, Any], single: Mapping[str, Any]) -> list[str]:
    """Return a line of the table; `single` has the figures of the framework with one optimizer instance."""
    on, off = figures["on"], figures["off"]
    memory, copies = by_design(row, on["shard"])
    # The counterpart of split sends it, too.
    sent = on["between"] if row.replica == "split" else on["sent"] - off["sent"]
    low, high = figures["interval"]
    return [
        row.name,
        f"{_mb(on['tensors'] - single['tensors'])} ({_mb(memory)})",
        _mb(on["anonymous"] - single["anonymous"]),
        _mb(on["anonymous"] - off["anonymous"]),
        f"{_mb(single['sent'])} → {_mb(on['sent'])}",
        f"{_mb(sent)} ({_mb(copies)})",
        _mb(on["sent"] - off["sent"]),
        f"{figures['ratio']:.3f} ({low:.3f} to {high:.3f})",
        f"{figures['milliseconds']:.0f}",
        f"{figures['others']:.1f}",
    ]


def _mb(count: float) -> str:
    return f"{round(count / 1e6, 2) + 0.0:.2f}"  # no negative zero


def missed(rows_missed: Sequence[Mapping[str, Any]]) -> str:
    """Return the explanation of a missed target from the figures of its rows."""
    steps = [figures["milliseconds"] for figures in rows_missed]
    added = [figures["milliseconds"] * (figures["ratio"] - 1) for figures in rows_missed]
    return MISSED.format(
        ranks=MAIN.processes,
        cores=os.cpu_count(),
        low=min(added),
        high=max(added),
        shortest=min(steps),
        longest=max(steps),
    )


HEAD = [
    "layout, replica",
    "more tensors, MB (design)",
    "more memory of the process, MB",
    "... than its counterpart",
    "sent by a rank in a step, MB",
    "of it for second copies (design)",
    "more than its counterpart",
    "step time, on / off (95 %)",
    "off, ms",
    "cores that others used",
]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks for each row")
    parser.add_argument("--block", type=int, default=8, help="steps in a block; the first is not timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1, help="of the order of turns and of the intervals")
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="LAYOUT", help=str(names))
    parser.add_argument(
        "--write", type=Path, metavar="PAGE", help="write the table into its section of a page"
    )
    options = parser.parse_args()
    settings = {
        name: vars(options)[name] for name in ("pairs", "block", "layers", "hidden", "sequence", "seed")
    }
    benchmark = Benchmark("layout_cost", settings)
    counted = "in a network namespace of its own"
    if not alone_on_the_network():
        counted = "of the whole machine, which has other traffic (no network namespace may be made here)"
    os.environ["WHY_SOCKET_IFNAME"] = "lo"
    kept = OUT / "layout_cost.json"
    earlier = json.loads(kept.read_text()) if kept.exists() else {}
    figures: dict[str, Any] = earlier["rows"] if earlier.get("settings") == settings else {}
    source = random.Random(options.seed)
    folder = new_folder("layout_cost")
    for number, row in enumerate(rows()):
        if row.family in options.only:
            print(row.name, flush=True)
            figures[row.name] = measure(row, folder / str(number), options, source)
    shutil.rmtree(folder)

    measured_rows = [row for row in rows() if row.name in figures]
    # The counterpart of `mirror`, and of what needs no replicas, has one instance.
    single_figures = {row.family: figures[row.name]["off"] for row in measured_rows if row.replica != "split"}
    lines = [
        line(
            row,
            figures[row.name],
            single_figures[row.family] if row.replica == "split" else figures[row.name]["off"],
        )
        for row in measured_rows
    ]
    text = table(HEAD, lines)
    text += f"\n\nBytes are counted on the loopback {counted}. {WHY}\n"
    for row in measured_rows:
        target = TARGETS.get(row.replica)
        if row.family == MAIN.name and not row.copies and target:
            ratio = figures[row.name]["ratio"]
            verdict = "reached" if ratio <= target else "MISSED"
            text += f"\n- {row.name}: step time {ratio:.3f} ×, target at most {target:g} ×: {verdict}"
    compared = sum(figures[row.name]["compared"] for row in measured_rows)
    if "MISSED" in text:
        main_rows = [row for row in measured_rows if row.family == MAIN.name and not row.copies]
        text += f"\n- {missed([figures[row.name] for row in main_rows])}"
    text += f"\n- losses and grad norms: {compared} compared, all equal, bit for bit"
    benchmark.finish(text, {"rows": figures, "counted": counted})
    if options.write:
        command = f"    python benchmarks/layout_cost.py --pairs {options.pairs} --write {options.write}"
        days = " and ".join(sorted({figures[row.name]["at"][:10] for row in measured_rows}))
        write_section(options.write, SECTION, f"{command}\n\nOn {benchmark.where}, {days}.\n\n{text}")


if __name__ == "__main__":
    run(main)
