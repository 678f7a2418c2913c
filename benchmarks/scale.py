"""The controller of a job of 100,000 ranks on 12,500 nodes, in one process: `python benchmarks/scale.py`.

The real controller, in the real hub with its timeline and its log, gets the encoded messages of the agents of
such a job, and its orders are encoded: only the network and asyncio's reading and writing are left out.
Seconds are CPU time of the controller's thread, which depends little on other load. Every shard of the
optimizer state has two holders, half of the job apart.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from _bench import Benchmark, argument_parser, table

from adaptor import config
from adaptor.launchers.control.agent_connections import LOOPBACK, RejectedConnections
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.launchers.records.log import Log
from adaptor.protocol import wire
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    AgentLost,
    BoardRecord,
    ControllerToAgent,
    Dump,
    Dying,
    Frozen,
    Hello,
    Layout,
    Phase,
    Prepared,
    Publish,
    ReplayComplete,
    Share,
    ToController,
    Written,
)
from adaptor.protocol.naming import FileEntry, temporary_name

PER_NODE = 8
TARGET_S, WHOLE_TARGET_S = 0.2, 0.5
STEP = 12
VICTIM, NODE, HOLDER = 7, 3, 11  # a rank that dies; a node that is lost; a holder that dies in the dump
DIES, ANSWERS = "a rank dies → freezes", "all but one of the answers"
LAST, PREPARED = "last answer → prepare", "prepared → dumps"


class Job:
    """A controller in its hub; `took` has the seconds of each action by name."""

    def __init__(self, ranks: int, groups: int, folder: str) -> None:
        self.ranks = ranks
        self.groups = groups
        self.folder = folder
        self.controller_host = self._controller_host(0)
        self.took: dict[str, float] = {}
        self.orders: list[ControllerToAgent] = []

    def _controller_host(self, term: int) -> ControllerHost:
        nodes, report = self.ranks // PER_NODE, IncidentReport(JobFiles(self.folder))
        return ControllerHost(
            term, self.ranks, nodes, 120.0, LOOPBACK, report, RejectedConnections("the controller's port")
        )

    def _send(self, orders: Sequence[ControllerToAgent]) -> None:
        self.controller_host.frames(orders)  # as an agent's connection is written to
        self.orders += orders

    def shares(self, rank: int) -> tuple[Share, ...]:
        """Rank r is in group r % groups; its place in the group decides about the shard."""
        group, place = rank % self.groups, rank // self.groups
        count = self.ranks // self.groups // 2
        return (Share(f"mp_rank_{group:05d}", place % count, count),)

    def hear(self, name: str, messages: Iterable[ToController]) -> list[str]:
        """Returns the kinds of the orders that came out."""
        heard = [(self._node(message), wire.frame(message)[4:], message) for message in messages]
        self.orders.clear()
        cpu_before = time.thread_time()
        for node, frame, message in heard:
            if isinstance(message, AgentLost):  # no agent says that
                self.controller_host.lose(node)
            else:
                decoded = wire.from_agent(frame)
                self.controller_host.receive(
                    node, decoded, self._send if isinstance(decoded, AgentHello) else None
                )
        self.took[name] = self.took.get(name, 0.0) + time.thread_time() - cpu_before
        inner = (order.message if isinstance(order, Addressed) else order for order in self.orders)
        return list(dict.fromkeys(type(order).__name__ for order in inner))

    def _node(self, message: ToController) -> int:
        """Return the node of the agent that sends a message; without a rank, the node of the save folder."""
        node = getattr(message, "node", None)
        return getattr(message, "rank", 0) // PER_NODE if node is None else node

    @property
    def dumps(self) -> list[Dump]:
        """Ordered by what was heard last."""
        inner = [order.message for order in self.orders if isinstance(order, Addressed)]
        return [order for order in inner if isinstance(order, Dump)]

    def start(self) -> None:
        nodes = range(self.ranks // PER_NODE)
        self.hear("start", (AgentHello(n, tuple(range(n * PER_NODE, (n + 1) * PER_NODE))) for n in nodes))
        self.hear("start", (Hello(rank, 4000 + rank) for rank in range(self.ranks)))
        layouts = (Layout(r, self.shares(r), "/checkpoints", 0, "0" * 32) for r in range(self.ranks))
        self.hear("start", layouts)

    def succeed(self) -> None:
        """Another controller takes the place of the controller on node 0; all agents repeat their
        messages.
        """
        nodes = self.ranks // PER_NODE
        hellos = [AgentHello(n, tuple(range(n * PER_NODE, (n + 1) * PER_NODE))) for n in range(nodes)]
        layouts = [Layout(r, self.shares(r), "/checkpoints", 0, "0" * 32) for r in range(self.ranks)]
        self.controller_host = self._controller_host(1)
        cpu_before = time.thread_time()
        self.controller_host.take_over([*hellos, *layouts])
        self.took["take-over"] = time.thread_time() - cpu_before
        for node in range(1, nodes):
            ranks = hellos[node].ranks
            messages = [hellos[node], *(Hello(r, 4000 + r) for r in ranks), *(layouts[r] for r in ranks)]
            self.hear("take-over: all are there → freezes", [*messages, ReplayComplete(node)])
            if node == 1:
                assert self.hear("take-over: node 0 is lost → freezes", [AgentLost(0)]) == ["Freeze"]

    def freeze(self, dead: set[int]) -> None:
        ranks = [rank for rank in range(self.ranks) if rank not in dead]
        self.hear(ANSWERS, map(self.frozen, ranks[:-1]))
        assert self.hear(LAST, [self.frozen(ranks[-1])]) == ["Prepare"]

    def frozen(self, rank: int) -> Frozen:
        return Frozen(rank, 1, BoardRecord(rank, 4000 + rank, Phase.RUNNING, STEP, STEP, STEP))

    def dump(self) -> None:
        prepared = Prepared(0, 1, f"/checkpoints/{temporary_name(STEP)}", "")
        assert self.hear(PREPARED, [prepared]) == ["Dump"]
        dying = Dying(HOLDER, 0.0, BoardRecord(HOLDER))
        assert self.hear("a holder dies in the dump → dumps", [dying]) == ["Dump"]
        dumps = self.dumps
        attempt = dumps[0].attempt
        groups = {order.group: order for dump in dumps for order in dump.groups}
        entry = FileEntry("model_optim_rng.pt", 1, "0" * 32, attempt)
        messages = [Written(order.writer, 1, attempt, name, (entry,)) for name, order in groups.items()]
        assert self.hear("all groups written → publish", messages) == [Publish.__name__]


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=100_000, help="a multiple of 8 and of twice the groups")
    parser.add_argument(
        "--groups", type=int, default=125, help="ranks that write: tensor × pipeline parallel"
    )
    options = parser.parse_args()
    if options.ranks % (2 * options.groups) or options.ranks % PER_NODE:
        parser.error(f"--ranks is {options.ranks}: give a multiple of {PER_NODE} and of {2 * options.groups}")
    benchmark = Benchmark("scale", {"ranks": options.ranks, "groups": options.groups})

    # Files of the jobs may be written a moment longer.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        log = Log(config.load({"TTP_LOG_PATH": folder}))
        seconds_by_action, memory = measure(options.ranks, options.groups, folder)
        log.close()

    decisions = [name for name in seconds_by_action if "→" in name and "all are there" not in name]
    rows = [[name, f"{seconds:.3f}"] for name, seconds in seconds_by_action.items()]
    worst = max(seconds_by_action[name] for name in decisions)
    total = sum(seconds_by_action[name] for name in (DIES, ANSWERS, LAST, PREPARED))
    verdicts = [
        "reached" if seconds <= target else "MISSED"
        for seconds, target in ((total, WHOLE_TARGET_S), (worst, TARGET_S))
    ]
    benchmark.finish(
        table(["s", ""], rows)
        + f"\n\nmemory at rest: {memory:.0f} MiB"
        + f"\na rank dies → dump orders out, all that the controller does: {total:.2f} s; "
        + f"at most {WHOLE_TARGET_S:g} s: {verdicts[0]}"
        + f"\nslowest decision, orders out: {worst:.2f} s; at most {TARGET_S:g} s: {verdicts[1]}",
        {
            "seconds": seconds_by_action,
            "whole_s": total,
            "memory_mib": memory,
            "targets_s": [WHOLE_TARGET_S, TARGET_S],
            "reached": worst <= TARGET_S and total <= WHOLE_TARGET_S,
        },
    )


def measure(ranks: int, groups: int, folder: str) -> tuple[dict[str, float], float]:
    """Seconds by what was done, and MiB at rest."""
    ControllerHost(
        0, 1, 1, 120.0, LOOPBACK, IncidentReport(JobFiles(folder)), RejectedConnections("")
    )  # imports torch, as any agent has
    gc.collect()
    memory_before = resident_mib()
    job = Job(ranks, groups, folder)
    job.start()
    job.orders.clear()
    gc.collect()
    memory = resident_mib() - memory_before
    orders = job.hear(DIES, [Dying(VICTIM, 0.0, BoardRecord(VICTIM))])
    assert orders == ["Freeze"]
    job.freeze({VICTIM})
    job.dump()

    other_job = Job(ranks, groups, folder)
    other_job.start()
    assert other_job.hear("a node is lost → freezes", [AgentLost(NODE)]) == ["Freeze"]
    other_job.succeed()
    return {**other_job.took, **job.took}, memory


if __name__ == "__main__":
    main()
