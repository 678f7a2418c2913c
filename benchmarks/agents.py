"""A controller with 1,000 agents over real sockets: `python benchmarks/agents.py`.

The controller runs as in ttprun: the real host, listener and timeline, in one event loop. One other process
plays the agents, each with a TCP connection of its own; they send the messages of agents and workers, and
note the arrival of each order. Unlike in a real job there are no workers and no network between machines, and
all agents share one processor. A rank of a node dies, survivors are frozen, save and publish (without any
files); then, in a second job, a whole node is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _bench import Benchmark, argument_parser, table

from adaptor.launchers.control.agent_connections import (
    LOOPBACK,
    AgentListener,
    RejectedConnections,
    connect,
    read_hello,
)
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.records.incident_events import IncidentReport
from adaptor.launchers.records.job_files import JobFiles
from adaptor.protocol import wire
from adaptor.protocol.messages import (
    Addressed,
    AgentHello,
    BoardRecord,
    Died,
    Dump,
    Dying,
    Exit,
    Freeze,
    Frozen,
    Hello,
    Layout,
    Phase,
    Prepare,
    Prepared,
    Publish,
    Published,
    Share,
    Verdict,
    Written,
)
from adaptor.protocol.naming import FileEntry, temporary_name

PER_NODE = 8
STEP = 12
VICTIM, LOST = 11, 3  # a rank that dies; a node that is lost
PORT = 18000
REST_S = 10.0  # so long the controller is watched at rest
GIVE_UP_S = 120.0  # something is wrong
TARGET_S = 1.0


def shares(rank: int, ranks: int, groups: int) -> tuple[Share, ...]:
    """Every shard has two holders, half of the job apart."""
    count = ranks // groups // 2
    return (Share(f"mp_rank_{rank % groups:05d}", rank // groups % count, count),)


class Agents:
    """All agents of a job; `seen` has when (monotonic seconds) orders of a kind came, the last of them."""

    def __init__(self, port: int, secret: str, nodes: int, groups: int) -> None:
        self._port, self._secret = port, bytes.fromhex(secret)
        self._nodes, self._groups = nodes, groups
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._verdicts = 0
        self.seen: dict[str, float] = {}
        self.over = asyncio.Event()

    async def start(self) -> None:
        await asyncio.gather(*map(self._join, range(self._nodes)))

    async def _join(self, node: int) -> None:
        reader, writer = await connect(LOOPBACK, self._port, self._secret, None)
        self._writers[node] = writer
        ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
        self._say(node, AgentHello(node, tuple(ranks)), *(Hello(rank, 4000 + rank) for rank in ranks))
        for rank in ranks:
            held_shards = shares(rank, self._nodes * PER_NODE, self._groups)
            self._say(node, Layout(rank, held_shards, "/checkpoints", 0, "0" * 32))
        self._tasks.append(asyncio.create_task(self._obey(node, reader)))

    def _say(self, node: int, *messages: Any) -> None:
        self._writers[node].write(b"".join(map(wire.frame, messages)))

    async def _obey(self, node: int, reader: asyncio.StreamReader) -> None:
        while True:
            try:
                order = await wire.read(reader, wire.to_agent)
            except (EOFError, OSError):
                return
            inner = order.message if isinstance(order, Addressed) else order
            self.seen[type(inner).__name__] = time.monotonic()
            self._answer(node, order.rank if isinstance(order, Addressed) else -1, inner)

    def _answer(self, node: int, rank: int, order: Any) -> None:
        match order:
            case Freeze(incident=incident):
                self._say(node, Frozen(rank, incident, _board(rank)))
            case Prepare(incident=incident, save_folder=save, step=step):
                self._say(node, Prepared(node, incident, f"{save}/{temporary_name(step)}", ""))
            case Dump(incident=incident, attempt=attempt, groups=groups):
                for group in groups:
                    if group.writer == rank:
                        entry = FileEntry(f"{group.group}/model_optim_rng.pt", 1, "0" * 32, attempt)
                        self._say(node, Written(rank, incident, attempt, group.group, (entry,)))
            case Publish(incident=incident, step=step):
                self._say(node, Published(node, incident, step, "/checkpoints/iter_0000012"))
            case Exit():
                self._say(node, Died(rank, 0, 0.0, _board(rank)))
            case Verdict():
                self._verdicts += 1
                if self._verdicts == len(self._writers):
                    self.over.set()

    def kill(self, rank: int) -> None:
        node = rank // PER_NODE
        self._say(node, Dying(rank, 0.0, _board(rank)), Died(rank, -9, 0.0, _board(rank)))

    def lose(self, node: int) -> None:
        self._writers.pop(node).close()


def _board(rank: int) -> BoardRecord:
    return BoardRecord(rank, 4000 + rank, Phase.RUNNING, STEP, STEP, STEP)


async def play(port: int, secret: str, nodes: int, groups: int, fault: str) -> None:
    """The agents' process: waits for a line, lets the fault happen, prints what came how long after."""
    print(json.dumps({"began": time.monotonic()}), flush=True)  # one clock for all processes
    agents = Agents(port, secret, nodes, groups)
    await agents.start()
    await asyncio.to_thread(sys.stdin.readline)
    began = time.monotonic()
    if fault == "rank":
        agents.kill(VICTIM)
    else:
        agents.lose(LOST)
    await asyncio.wait_for(agents.over.wait(), GIVE_UP_S)
    print(json.dumps({kind: at - began for kind, at in agents.seen.items()}), flush=True)


class CountingHub(ControllerHost):
    """Knows how many ranks have told their layout."""

    layouts = 0

    def receive(self, node: int, message: Any, send: Any = None) -> bool:
        taken = super().receive(node, message, send)
        self.layouts += isinstance(message, Layout)
        return taken


async def job(nodes: int, groups: int, fault: str, folder: str) -> dict[str, float]:
    """Run one job; return seconds, MiB, and the share of a core at rest."""
    rejected, secret = RejectedConnections("the controller's port"), secrets.token_bytes(32)
    controller_host = CountingHub(
        0, nodes * PER_NODE, nodes, GIVE_UP_S, LOOPBACK, IncidentReport(JobFiles(folder)), rejected
    )
    listener = AgentListener(
        secret, None, rejected, controller_host.serve, read_hello, further_connections=nodes
    )
    memory_before = _resident_mib()
    controller_host.start()
    port = listener.listen(LOOPBACK, PORT)
    agents = await asyncio.create_subprocess_exec(
        sys.executable,
        *(__file__, "--play", str(port), secret.hex(), fault, "--nodes", str(nodes), "--groups", str(groups)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    says, hears = agents.stdin, agents.stdout
    assert says is not None
    assert hears is not None

    async def told() -> dict[str, float]:
        line: dict[str, float] = json.loads(await asyncio.wait_for(hears.readline(), GIVE_UP_S))
        return line

    began = (await told())["began"]
    figures = {"registered": await _until(lambda: controller_host.layouts == nodes * PER_NODE) - began}
    used, since = _cpu(), time.monotonic()
    await asyncio.sleep(REST_S)
    figures["rest"] = (_cpu() - used) / (time.monotonic() - since)
    figures["memory"] = _resident_mib() - memory_before
    says.write(b"fault\n")
    figures |= await told()
    await agents.wait()
    began = time.monotonic()
    await controller_host.close()
    await listener.close()
    figures["closed"] = time.monotonic() - began
    return figures


async def _until(condition: Callable[[], bool]) -> float:
    deadline = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    return time.monotonic()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--nodes", type=int, default=1000, help="a multiple of a quarter of the groups")
    parser.add_argument("--groups", type=int, default=8, help="ranks that write: tensor × pipeline parallel")
    parser.add_argument("--play", nargs=3, metavar=("PORT", "SECRET", "FAULT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.nodes * PER_NODE % (2 * options.groups) or options.nodes <= LOST:
        parser.error(
            f"--nodes is {options.nodes}: give a multiple of {2 * options.groups / PER_NODE:g} from 4 on"
        )
    if options.play is not None:
        port, secret, fault = options.play
        asyncio.run(play(int(port), secret, options.nodes, options.groups, fault))
        return

    benchmark = Benchmark("agents", {"agents": options.nodes, "ranks": options.nodes * PER_NODE})
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        faults = {
            f"a {fault} is lost": asyncio.run(job(options.nodes, options.groups, fault, folder))
            for fault in ("rank", "node")
        }
    steps = {
        "registered": "all have come and told their layouts",
        "Freeze": "fault → last freeze order there",
        "Prepare": "fault → all boards in, prepare order there",
        "Dump": "fault → last dump order there",
        "Publish": "fault → all groups written, publish order there",
        "Verdict": "fault → last verdict there",
        "closed": "the controller closes",
    }
    rows = [[text, *(f"{figures[key]:.3f}" for figures in faults.values())] for key, text in steps.items()]
    first = next(iter(faults.values()))
    worst = max(figures["Dump"] for figures in faults.values())
    verdict = "reached" if worst <= TARGET_S else "MISSED"
    benchmark.finish(
        table(["s", *faults], rows)
        + f"\n\ncontroller at rest: {100 * first['rest']:.1f} % of a core, {first['memory']:.0f} MiB"
        + f"\nslowest fault → dump orders there: {worst:.2f} s; at most {TARGET_S:g} s: {verdict}",
        {"faults": faults, "target_s": TARGET_S, "reached": worst <= TARGET_S},
    )


if __name__ == "__main__":
    main()
