"""Time from the loss of a node to the next finished step: `python benchmarks/node_loss.py`.

Two or more nodes (`--nodes`) and a spare node, in network namespaces of this machine (root, or a user with
that permission). `ttprun` of node 1, or of node 0 (`--node 0`), is killed with its workers in a drawn phase
of a step; or the node is cut off from the others and lives on (`--cut`). Three ways take turns: the spare
node takes the place online, with processes that have imported the workers' modules, and without; and all
ranks restart with the spare node. The time starts on the dying node; a step is finished when every rank has
finished. All losses and grad norms of each job, and its last checkpoint, are compared bit for bit with those
of the unmodified framework without faults.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _bench import Benchmark, argument_parser, spread, table
from _job import JobError, new_folder, run

from tests.certificates import Authority
from tests.faults import harness, keeping, namespaces, outcome, scenario
from tests.faults.harness import DP2_MIRROR, DP4, ITERATIONS, MOE_EP2, TP2_DP2, Job, Layout
from tests.faults.same import differences
from tests.faults.scenario import Baseline

PHASES = ("forward", "backward", "reduction", "norm", "door-before", "update", "gather")
STEPS = range(3, ITERATIONS)
# With a copy of every shard on each of two nodes.
LAYOUTS = {"dp4": DP4, "tp2-dp2": TP2_DP2, "dp2-mirror": DP2_MIRROR, "moe-dp4-ep2": MOE_EP2}


@dataclass(frozen=True)
class Way:
    """A way to recover from the loss of a node; `target_s` of the median, None: the way is the reference."""

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


@dataclass(frozen=True)
class Loss:
    """The loss of `node`: the layout, and the phase of the step."""

    layout: str
    phase: str
    step: int
    node: int


def measure(
    folder: Path, way: Way, loss: Loss, baseline: Baseline, nodes: int, *, cut: bool, tls: bool
) -> float:
    """Run a job that loses a node; return the seconds from the loss to the next finished step."""
    layout: Layout = LAYOUTS[loss.layout]
    rank = (loss.node + 1) * layout.processes // nodes - 1 if loss.node else 0
    kind = "cut" if cut else way.kind
    folder.mkdir()
    with namespaces.star(nodes + 1, cut=loss.node) as network:
        result = harness.run(
            Job(
                folder / "job",
                layout,
                save=folder / "save",
                faults=[f"rank={rank},step={loss.step},phase={loss.phase},kind={kind}"],
                nodes=nodes,
                spares=1,
                network=network,
                environment=Authority(folder / "signer").settings() if tls else {"TTP_TLS": "plain"},
                options=way.options,
                restarts=1,
                cold=True,
            )
        )
    if [code for node, code in enumerate(result.codes) if node != loss.node] != [0] * nodes:
        raise JobError(f"exit codes {result.codes}:\n{result.log[-3000:]}")
    is_online = way.options[1] != "0"
    if ("(1 without a restart)" in result.logs[1 - loss.node]) != is_online:
        raise JobError(f"it was {'not ' if is_online else ''}recovered online:\n{result.log[-3000:]}")
    # The line of the step that all go on from may be written nowhere; what follows depends on it.
    steps = {*range(1, ITERATIONS + 1)} - {loss.step - 1, loss.step}
    outcome.assert_same_training(result, baseline.records, steps=steps)
    name = f"iter_{ITERATIONS:07d}"
    differing = differences(folder / "save" / name, baseline.checkpoints / name)
    if not is_online:  # the framework saves with which arguments it was started
        differing = [line for line in differing if "/args./" not in line]
    if differing:
        raise JobError(f"the checkpoint at the end differs: {differing[:3]}")
    struck = result.stamps[0]["time"]
    # The other ranks may still finish the step that they are in, and never the next one.
    lines_after = {
        rank: [line for line in lines if line["time"] > struck] for rank, lines in result.records.items()
    }
    return (
        max(
            min(line["time"] for line in lines if line["iteration"] > loss.step)
            for lines in lines_after.values()
        )
        - struck
    )


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--rounds", type=int, default=10, help="jobs of each way, in turns; each loses a node"
    )
    parser.add_argument("--seed", type=int, default=1, help="of phases and steps")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["dp4"], help="in turn")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--node", type=int, choices=(0, 1), default=1, help="that is lost")
    parser.add_argument("--nodes", type=int, choices=(2, 4), default=2, help="beside the spare node")
    parser.add_argument("--cut", action="store_true", help="the node is cut off, and not killed")
    parser.add_argument("--tls", action="store_true", help="with certificates")
    options = parser.parse_args()
    if not namespaces.permitted():
        raise JobError("this user may make no network namespace")
    shape = {"node": options.node, "nodes": options.nodes, "cut": options.cut, "tls": options.tls}
    benchmark = Benchmark(
        "node_loss", {"rounds": options.rounds, "layouts": ", ".join(options.layouts), **shape}
    )
    source = random.Random(options.seed)
    folder = new_folder("node_loss")
    baseline_of = scenario.baselines(keeping.KEPT)
    times_by_way: dict[str, list[float]] = {name: [] for name in options.ways}
    for number in range(options.rounds):
        name = options.layouts[number % len(options.layouts)]
        loss = Loss(name, source.choice(PHASES), source.choice(STEPS), options.node)
        baseline = baseline_of(LAYOUTS[name])
        for way in options.ways:
            print(f"round {number + 1} of {options.rounds}, {loss}: {way}", flush=True)
            place = folder / f"{number}-{len(list(folder.iterdir()))}"
            cost = measure(place, WAYS[way], loss, baseline, options.nodes, cut=options.cut, tls=options.tls)
            times_by_way[way].append(cost)
    shutil.rmtree(folder)

    rows: list[list[Any]] = []
    for name, times in times_by_way.items():
        # A silent node is missed after 2 to 3 s, and the fault does not wait for warm processes.
        measured, target = spread(times), None if options.cut else WAYS[name].target_s
        reached = "–" if target is None else "reached" if measured["median"] <= target else "MISSED"
        cell = f"{measured['median']:.2f} ({measured['min']:.2f} to {measured['max']:.2f})"
        rows.append([name, cell, len(times), "–" if target is None else f"≤ {target:g}: {reached}"])
    head = ["seconds from the loss to the next finished step, median (range)", "", "nodes lost", "target"]
    benchmark.finish(table(head, rows), {"ways": times_by_way})


if __name__ == "__main__":
    run(main)
