"""What protection costs in each layout: memory, bytes sent, step time: `python benchmarks/layout_cost.py`.

For each layout and replica the jobs of step_cost.py take turns, and besides the step time these are measured:

memory  of a rank, while it waits between two steps: the bytes of all its tensors, and all memory of its
        process that is no file's
bytes   on the loopback while a job makes a block of steps: all that gloo sends, with the headers. Where it
        may, the benchmark moves into a network namespace of its own, so that nothing else is counted. What
        `split` sends between the optimizer instances is counted in the calls besides

The counterpart of a job is the unmodified framework: with `split` with its own two optimizer instances, else
with one. Step times are against it, memory and bytes also against one instance. In brackets is what the table
of the design says: for N parameters on d ranks 12·N/d bytes of memory, and 8·N/d bytes to send with `split`;
with `mirror` 4·N/d bytes more memory, and as many to send; with TTP_LOCAL_COPY 12 bytes for each parameter
that a rank updates.

With `--only` the rows of the other layouts are those of an earlier run, if there was one. Without names after
it nothing is run, and the rows that there are are written.
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
    """What is measured: a layout as it asks for its replica."""

    family: str
    layout: Layout
    replica: str
    copies: bool = False

    @property
    def name(self) -> str:
        return f"{self.family}, {self.replica}" + (", local copy" if self.copies else "")


def rows() -> list[Row]:
    """All of them; of each layout first those whose counterpart has one optimizer instance."""
    found = []
    for layout in LAYOUTS:
        for replica, cut in sorted(replicas(layout)):
            found.append(Row(layout.name, cut, replica))
            if layout is MAIN:
                found.append(Row(layout.name, cut, replica, copies=True))
    return found


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

    before, began = idle(), time.monotonic()
    time.sleep(1.0)
    free = (idle() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    return max(0.0, (os.cpu_count() or 1) - free)


def measure(row: Row, folder: Path, given: argparse.Namespace, source: random.Random) -> dict[str, Any]:
    """Run both jobs of a row; the figures of each, for a rank of the mean."""
    layout = row.layout
    cut = ("--tensor-model-parallel-size", str(layout.tp))
    race = Race(
        given.pairs,
        given.block,
        instances=2 if row.replica == "split" else 1,
        alike=True,
        extra=[*model(given.layers, given.hidden, given.sequence), *cut, *layout.arguments],
        environment={"TTP_REPLICA": layout.replica, "TTP_LOCAL_COPY": str(row.copies)},
        ranks=layout.processes,
        distributed=layout.distributed_optimizer,
        cost=True,
    )
    others = _busy()
    ended = one_start(folder, race, source)
    ratios = [on / off for off, on in zip(ended["off"], ended["on"], strict=True)]
    sent = ended["sent"]
    arms = {arm: _figures(ended["watched"][arm], statistics.median(sent[arm]), layout) for arm in sent}
    return {
        **arms,
        "ratio": statistics.median(ratios),
        "interval": interval(ratios, given.seed),
        "milliseconds": 1000 * statistics.median(ended["off"]),
        "compared": ended["compared"],
        "sent": sent,
        "others": others,
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
    """What the table says: more memory and more bytes to send, for parameters divided among d ranks."""
    memory = {"split": 12 * shard, "mirror": 16 * shard, "none": 0.0}[row.replica]
    # With either replica a rank updates two shards: one that is twice as long, or its neighbour's, too.
    memory += 24 * shard if row.copies else 0.0
    return memory, {"split": 8 * shard, "mirror": 4 * shard, "none": 0.0}[row.replica]


def line(row: Row, found: Mapping[str, Any], one: Mapping[str, Any]) -> list[str]:
    """A line of the table; `one` has the figures of the framework with one optimizer instance."""
    on, off = found["on"], found["off"]
    memory, copies = by_design(row, on["shard"])
    # The counterpart of split sends it, too.
    sent = on["between"] if row.replica == "split" else on["sent"] - off["sent"]
    low, high = found["interval"]
    return [
        row.name,
        f"{_mb(on['tensors'] - one['tensors'])} ({_mb(memory)})",
        _mb(on["anonymous"] - one["anonymous"]),
        _mb(on["anonymous"] - off["anonymous"]),
        f"{_mb(one['sent'])} → {_mb(on['sent'])}",
        f"{_mb(sent)} ({_mb(copies)})",
        _mb(on["sent"] - off["sent"]),
        f"{found['ratio']:.3f} ({low:.3f} to {high:.3f})",
        f"{found['milliseconds']:.0f}",
        f"{found['others']:.1f}",
    ]


def _mb(count: float) -> str:
    return f"{round(count / 1e6, 2) + 0.0:.2f}"  # no negative zero


def missed(found: Sequence[Mapping[str, Any]]) -> str:
    """Return what a target that was missed means, by what was measured of these rows."""
    steps = [one["milliseconds"] for one in found]
    added = [one["milliseconds"] * (one["ratio"] - 1) for one in found]
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
    before = json.loads(kept.read_text()) if kept.exists() else {}
    found: dict[str, Any] = before["rows"] if before.get("settings") == settings else {}
    source = random.Random(options.seed)
    folder = new_folder("layout_cost")
    for number, row in enumerate(rows()):
        if row.family in options.only:
            print(row.name, flush=True)
            found[row.name] = measure(row, folder / str(number), options, source)
    shutil.rmtree(folder)

    known = [row for row in rows() if row.name in found]
    # The counterpart of `mirror`, and of what needs no replicas, has one instance.
    ones = {row.family: found[row.name]["off"] for row in known if row.replica != "split"}
    lines = [
        line(row, found[row.name], ones[row.family] if row.replica == "split" else found[row.name]["off"])
        for row in known
    ]
    text = table(HEAD, lines)
    text += f"\n\nBytes are counted on the loopback {counted}. {WHY}\n"
    for row in known:
        target = TARGETS.get(row.replica)
        if row.family == MAIN.name and not row.copies and target:
            ratio = found[row.name]["ratio"]
            verdict = "reached" if ratio <= target else "MISSED"
            text += f"\n- {row.name}: step time {ratio:.3f} ×, target at most {target:g} ×: {verdict}"
    compared = sum(found[row.name]["compared"] for row in known)
    if "MISSED" in text:
        text += (
            f"\n- {missed([found[row.name] for row in known if row.family == MAIN.name and not row.copies])}"
        )
    text += f"\n- losses and grad norms: {compared} compared, all equal, bit for bit"
    benchmark.finish(text, {"rows": found, "counted": counted})
    if options.write:
        command = f"    python benchmarks/layout_cost.py --pairs {options.pairs} --write {options.write}"
        when = " and ".join(sorted({found[row.name]["at"][:10] for row in known}))
        write_section(options.write, SECTION, f"{command}\n\nOn {benchmark.where}, {when}.\n\n{text}")


if __name__ == "__main__":
    run(main)
