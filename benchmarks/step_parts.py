"""The cost of a step, part by part, one process on each core: `python benchmarks/step_parts.py`.

One job of two processes, each pinned to a core, turns the adaptor off and on every few steps (`_parts.py`).
So both see the same machine, process groups and memory, and neighbouring blocks are a pair: the figure is the
median of the pairs' ratios, with a 95 % interval (bootstrap over pairs). The parts are the adaptor's own work
on the main thread; "elsewhere" is the rest of the difference: caches that the parts have emptied, other
threads, and ranks that wait for each other in the framework's collectives instead of in a part. What
`step_cost.py` measures besides: the patches themselves, and groups that the framework alone would not have.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Benchmark, table
from _job import Job, JobError, model, new_folder, run
from _parts import PARTS, WARM_UP
from step_cost import interval

RANKS = 2
RESOLUTION = 0.005
_LIMIT_S = 3600.0


@dataclass(frozen=True)
class Row:
    """A layout with its replica; `distributed`: its optimizer is."""

    name: str
    environment: Mapping[str, str]
    distributed: bool = True


ROWS = (
    Row("split", {"TTP_REPLICA": "split"}),
    Row("mirror", {"TTP_REPLICA": "mirror"}),
    Row("mirror, local copy", {"TTP_REPLICA": "mirror", "TTP_LOCAL_COPY": "True"}),
    Row("none", {"TTP_REPLICA": "none"}),
    Row("whole optimizer", {}, distributed=False),
)


def measure(row: Row, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Run the job of a row.

    Returns:
        `pairs`: of (off, on), the mean over ranks of what a step took (`_parts.py`).
    """
    steps = WARM_UP + 2 * given.pairs * given.block + 1
    job = Job(
        folder,
        adaptor=True,
        train_iters=steps,
        ranks=RANKS,
        distributed=row.distributed,
        extra=[
            *model(given.layers, given.hidden, given.sequence),
            *("--global-batch-size", str(given.global_batch)),
        ],
        parts=f"{given.block},{given.pairs},{given.seed}",
        environment={**row.environment, "TTP_HANG": "0"},
    )
    with job:
        code = job.wait(_LIMIT_S)
    if code != 0:
        raise JobError(f"{row.name}: exit code {code}: see {job.log}")
    blocks: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS)}
    for line in job.watched():
        blocks[line["rank"]].append(line)
    of_all = [_mean(ranks) for ranks in zip(*blocks.values(), strict=True)]
    if len(of_all) != 2 * given.pairs:
        raise JobError(
            f"{row.name}: {len(of_all)} of {2 * given.pairs} blocks were written down: see {job.log}"
        )
    pairs = [sorted(of_all[at : at + 2], key=lambda one: one["arm"]) for at in range(0, len(of_all), 2)]
    return {"pairs": pairs}


def _mean(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of what each rank wrote down of the same block."""

    def mean(values: Sequence[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: mean([value[name] for value in values]) for name in values[0]}
        return statistics.mean(values)

    (arm,) = {line["arm"] for line in ranks}
    keys = ("wall", "cpu", "switches", "faults", "collectives", "parts", "parts_cpu", "calls")
    return {"arm": arm, **{key: mean([line[key] for line in ranks]) for key in keys}}


def summary(found: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The figures of a row: ratio and interval of wall and CPU time, and medians over pairs."""
    pairs = [(off, on) for off, on in found["pairs"]]
    made: dict[str, Any] = {}
    for key in ("wall", "cpu"):
        ratios = [on[key] / off[key] for off, on in pairs]
        made[key] = {
            "off": statistics.median(off[key] for off, _ in pairs),
            "added": statistics.median(on[key] - off[key] for off, on in pairs),
            "ratio": statistics.median(ratios),
            "interval": interval(ratios, seed),
        }
    for key in ("switches", "faults", "collectives"):
        made[key] = statistics.median(on[key] - off[key] for off, on in pairs)
    for key in ("parts", "parts_cpu", "calls"):
        made[key] = {part: statistics.median(on[key][part] for _, on in pairs) for part in PARTS}
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [row.name for row in ROWS]
    parser.add_argument("--only", nargs="*", choices=names, default=names, metavar="ROW", help=str(names))
    parser.add_argument("--pairs", type=int, default=120, help="pairs of blocks, one off and one on")
    parser.add_argument("--block", type=int, default=5, help="steps in a block; the first is not counted")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--global-batch", type=int, default=8, help="sequences per step, of both ranks")
    parser.add_argument("--seed", type=int, default=1, help="of the order of blocks and of the intervals")
    given = parser.parse_args()
    if len(os.sched_getaffinity(0)) < RANKS:
        parser.error(f"{len(os.sched_getaffinity(0))} core may be used here: {RANKS} processes need one each")
    benchmark = Benchmark("step_parts", vars(given))
    folder = new_folder("step_parts")
    found = {}
    for number, row in enumerate(ROWS):
        if row.name in given.only:
            print(row.name, flush=True)
            found[row.name] = summary(measure(row, folder / str(number), given), given.seed)
    shutil.rmtree(folder)
    benchmark.finish(report(found), {"rows": found})


def report(found: Mapping[str, Any]) -> str:
    """The tables: the ratios, and what each part adds to them."""
    rows = []
    for name, one in found.items():
        wall, cpu = one["wall"], one["cpu"]
        half = (wall["interval"][1] - wall["interval"][0]) / 2
        known = f"±{100 * half:.2f} %" + ("" if half <= RESOLUTION else ": too coarse")
        rows.append(
            [
                name,
                f"{wall['off']:.1f}",
                f"{wall['ratio']:.4f} ({wall['interval'][0]:.4f} to {wall['interval'][1]:.4f}, {known})",
                f"{cpu['off']:.1f}",
                f"{cpu['ratio']:.4f} ({cpu['interval'][0]:.4f} to {cpu['interval'][1]:.4f})",
                *(f"{one[key]:+.1f}" for key in ("collectives", "switches", "faults")),
            ]
        )
    head = ["", "off, ms", "on / off (95 %)", "CPU, off, ms", "CPU, on / off (95 %)"]
    text = table([*head, "collectives", "context switches", "page faults"], rows)
    for key, parts, what in (("wall", "parts", "wall time"), ("cpu", "parts_cpu", "CPU time")):
        lines = [[part, *(f"{one[parts][part]:.3f}" for one in found.values())] for part in PARTS]
        sums = [one[key]["added"] - sum(one[parts].values()) for one in found.values()]
        lines.append(["elsewhere", *(f"{value:.3f}" for value in sums)])
        lines.append(["the difference", *(f"{one[key]['added']:.3f}" for one in found.values())])
        text += "\n\n" + table([f"{what} that a step adds, ms", *found], lines)
    return text


if __name__ == "__main__":
    run(main)
