"""The controller of a job of 100,000 ranks on 12,500 nodes, in one process: `python benchmarks/scale.py`.

The real controller is given what the agents of such a job would say, as it comes off the wire, and its orders
are encoded as they go out: so all that is left out is the network itself. Every shard of the optimizer state
has two holders, half of the job apart.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterable
from pathlib import Path

from _bench import Benchmark, table

from adaptor.checkpoint.manifest import FileEntry
from adaptor.control import wire
from adaptor.control.controller import Controller
from adaptor.control.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    BoardRecord,
    Dump,
    Dying,
    Frozen,
    Hello,
    Layout,
    Phase,
    Prepared,
    Publish,
    Recalled,
    Share,
    ToController,
    Written,
)

PER_NODE = 8
TARGET_S = 1.0
STEP = 12
VICTIM, NODE, HOLDER = 7, 3, 11  # a rank that dies; a node that is lost; a holder that dies in the dump


class Job:
    """A controller and the clock of this process; `took` keeps seconds by the name of what was done."""

    def __init__(self, ranks: int, groups: int) -> None:
        self.ranks = ranks
        self.groups = groups
        self.controller = Controller(ranks, 120.0, ("node-0", 1))
        self.took: dict[str, float] = {}
        self.dumps: list[Dump] = []
        self.answers: list[int] = []

    def shares(self, rank: int) -> tuple[Share, ...]:
        """Rank r is in group r % groups; its place in the group decides about the shard."""
        group, place = rank % self.groups, rank // self.groups
        count = self.ranks // self.groups // 2
        return (Share(f"mp_rank_{group:05d}", place % count, count),)

    def hear(self, name: str, messages: Iterable[ToController]) -> list[str]:
        """Returns the kinds of the orders that came out."""
        messages = list(messages)
        lost = [message for message in messages if isinstance(message, AgentLost)]  # no agent says that
        frames = [wire.frame(message)[4:] for message in messages if not isinstance(message, AgentLost)]
        kinds: dict[str, None] = {}
        before = time.perf_counter()
        for message in (*map(wire.from_agent, frames), *lost):
            for _, order in self.controller.handle(message, 1.0):
                wire.frame(order)
                inner = order.message if isinstance(order, Addressed) else order
                kinds[type(inner).__name__] = None
                if isinstance(inner, Dump):
                    self.dumps.append(inner)
        self.took[name] = self.took.get(name, 0.0) + time.perf_counter() - before
        return list(kinds)

    def start(self) -> None:
        nodes = range(self.ranks // PER_NODE)
        self.hear("start", (AgentHello(n, tuple(range(n * PER_NODE, (n + 1) * PER_NODE))) for n in nodes))
        self.hear("start", (Hello(rank, 4000 + rank) for rank in range(self.ranks)))
        said = (Layout(r, self.shares(r), "/checkpoints", 0, "0" * 32) for r in range(self.ranks))
        self.hear("start", said)

    def succeed(self) -> None:
        """Another controller takes the place of the one on node 0; all agents say again what they know."""
        nodes = self.ranks // PER_NODE
        hellos = [AgentHello(n, tuple(range(n * PER_NODE, (n + 1) * PER_NODE))) for n in range(nodes)]
        layouts = [Layout(r, self.shares(r), "/checkpoints", 0, "0" * 32) for r in range(self.ranks)]
        self.controller = Controller(self.ranks, 120.0, ("node-1", 1), term=1)
        before = time.perf_counter()
        self.controller.succeed([*hellos, *layouts], range(1, nodes), 1.0)
        self.took["take-over"] = time.perf_counter() - before
        for node in range(1, nodes):
            ranks = hellos[node].ranks
            said = [hellos[node], *(Hello(r, 4000 + r) for r in ranks), *(layouts[r] for r in ranks)]
            self.hear("take-over: all are there → freezes", [*said, Recalled(node)])
            if node == 1:
                assert self.hear("take-over: node 0 is lost → freezes", [AgentLost(0)]) == ["Freeze"]

    def freeze(self, dead: set[int]) -> None:
        ranks = [rank for rank in range(self.ranks) if rank not in dead]
        self.hear("all but one of the answers", map(self.frozen, ranks[:-1]))
        assert self.hear("last answer → prepare", [self.frozen(ranks[-1])]) == ["Prepare"]

    def frozen(self, rank: int) -> Frozen:
        return Frozen(rank, 1, BoardRecord(rank, 4000 + rank, Phase.RUNNING, STEP, STEP, STEP))

    def dump(self) -> None:
        told = Prepared(1, "/checkpoints/iter_0000012_tmp", "")
        assert self.hear("prepared → dumps", [told]) == ["Dump"]
        self.dumps.clear()
        dying = Dying(HOLDER, 0.0, BoardRecord(HOLDER))
        assert self.hear("a holder dies in the dump → dumps", [dying]) == ["Dump"]
        attempt = self.dumps[0].attempt
        groups = {order.group: order for dump in self.dumps for order in dump.groups}
        entry = FileEntry("model_optim_rng.pt", 1, "0" * 32, attempt)
        said = [Written(order.writer, 1, attempt, name, (entry,)) for name, order in groups.items()]
        assert self.hear("all groups written → publish", said) == [Publish.__name__]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=100_000, help="a multiple of 8 and of twice the groups")
    parser.add_argument(
        "--groups", type=int, default=125, help="ranks that write: tensor × pipeline parallel"
    )
    given = parser.parse_args()
    if given.ranks % (2 * given.groups) or given.ranks % PER_NODE:
        parser.error(f"--ranks is {given.ranks}: give a multiple of {PER_NODE} and of {2 * given.groups}")
    benchmark = Benchmark("scale", {"ranks": given.ranks, "groups": given.groups})

    gc.collect()
    before = resident_mib()
    job = Job(given.ranks, given.groups)
    job.start()
    gc.collect()
    memory = resident_mib() - before
    orders = job.hear("a rank dies → freezes", [Dying(VICTIM, 0.0, BoardRecord(VICTIM))])
    assert orders == ["Freeze"]
    job.freeze({VICTIM})
    job.dump()

    other = Job(given.ranks, given.groups)
    other.start()
    assert other.hear("a node is lost → freezes", [AgentLost(NODE)]) == ["Freeze"]
    other.succeed()
    found = {**other.took, **job.took}

    decisions = [name for name in found if "→" in name and "all are there" not in name]
    rows = [[name, f"{seconds:.3f}"] for name, seconds in found.items()]
    worst = max(found[name] for name in decisions)
    verdict = "reached" if worst <= TARGET_S else "MISSED"
    benchmark.finish(
        table(["s", ""], rows)
        + f"\n\nmemory at rest: {memory:.0f} MiB"
        + f"\nslowest decision, orders out: {worst:.2f} s; at most {TARGET_S:g} s: {verdict}",
        {"seconds": found, "memory_mib": memory, "target_s": TARGET_S, "reached": worst <= TARGET_S},
    )


if __name__ == "__main__":
    main()
