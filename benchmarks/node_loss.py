"""How long from the loss of a node to the next finished step: `python benchmarks/node_loss.py`.

Two nodes with two processes each and a spare node, in network namespaces of this machine (root, or a user
who may make them). `ttprun` of node 1 is killed in a phase of a step that is drawn, and its workers with it.
Three ways in turns: the spare node takes the place online, with processes that have imported what workers
have, and without; and all start again with the spare node in that place. The time is that of the dying node
itself; a step is finished when every rank has.
"""

from __future__ import annotations

import argparse
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Benchmark, spread, table
from _job import JobError, new_folder, run

from tests.faults import harness, namespaces
from tests.faults.harness import DP4, Job

PHASES = ("forward", "backward", "reduction", "norm", "door-before", "update", "gather")
STEP = 6


@dataclass(frozen=True)
class Way:
    """What becomes of a lost node; `target_s` of the median, None: what the others are compared with."""

    kind: str
    options: tuple[str, ...]
    target_s: float | None


WAYS = {
    "online, the spare node is warm": Way(
        "agent-sigkill-beside-a-spare-node", ("--ttp-online", "60", "--ttp-spares", "1"), 2.0
    ),
    "online, the spare node is cold": Way("agent-sigkill", ("--ttp-online", "60", "--ttp-spares", "0"), None),
    "restart of all, with the spare node": Way("agent-sigkill", ("--ttp-online", "0"), None),
}


def measure(folder: Path, way: Way, phase: str) -> float:
    """Run a job that loses node 1; return the seconds from that to the next finished step."""
    with namespaces.two() as network:
        ended = harness.run(
            Job(
                folder / "job",
                DP4,
                save=folder / "save",
                faults=[f"rank=3,step={STEP},phase={phase},kind={way.kind}"],
                nodes=2,
                spares=1,
                network=network,
                environment={"TTP_TLS": "plain"},
                options=way.options,
                restarts=1,
                cold=True,
            )
        )
    if sorted(ended.codes) != [0, 0, 137]:
        raise JobError(f"exit codes {ended.codes}:\n{ended.log[-3000:]}")
    is_online = way.options[1] != "0"
    if ("(1 without a restart)" in ended.log) != is_online:
        raise JobError(f"it was {'not ' if is_online else ''}recovered online:\n{ended.log[-3000:]}")
    struck = ended.stamps[0]["time"]
    # The other ranks may still finish the step that they are in, and never the next one.
    done = {rank: [line for line in lines if line["time"] > struck] for rank, lines in ended.records.items()}
    return (
        max(min(line["time"] for line in lines if line["iteration"] > STEP) for lines in done.values())
        - struck
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=10, help="jobs of each way, in turns; each loses a node"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the phases")
    given = parser.parse_args()
    if not namespaces.permitted():
        raise JobError("this user may make no network namespace")
    benchmark = Benchmark("node_loss", {"rounds": given.rounds})
    source = random.Random(given.seed)
    folder = new_folder("node_loss")
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(given.rounds):
        phase = source.choice(PHASES)
        for name, way in WAYS.items():
            print(f"round {number + 1} of {given.rounds}, {phase}: {name}", flush=True)
            found[name].append(measure(folder / f"{number}-{len(list(folder.iterdir()))}", way, phase))
    shutil.rmtree(folder)

    rows: list[list[Any]] = []
    for name, times in found.items():
        there, target = spread(times), WAYS[name].target_s
        reached = "–" if target is None else "reached" if there["median"] <= target else "MISSED"
        cell = f"{there['median']:.2f} ({there['min']:.2f} to {there['max']:.2f})"
        rows.append([name, cell, len(times), "–" if target is None else f"≤ {target:g}: {reached}"])
    head = ["seconds from the loss to the next finished step, median (range)", "", "nodes lost", "target"]
    benchmark.finish(table(head, rows), {"ways": found})


if __name__ == "__main__":
    run(main)
