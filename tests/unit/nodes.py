"""Real agents' control threads (`Node`) and real workers, without torch's elastic agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from adaptor import config
from adaptor.checkpoint import tracker
from adaptor.controller import failover
from adaptor.launchers.agent import worker_watch
from adaptor.launchers.agent.node import Node
from adaptor.launchers.agent.processes import SPARE, WORKER
from adaptor.launchers.control import agent_connections
from adaptor.launchers.control.controller_host import ControllerHost
from adaptor.launchers.spares.spare_pool import Spare
from adaptor.protocol.messages import Verdict
from tests import waiting
from tests.faults.warm import Warm
from tests.unit.threads import LONG_S

SCRIPT = Path(__file__).with_name("worker_script.py")
ROOT = Path(__file__).parents[2]


def is_gone(pid: int) -> bool:
    """Return whether a process is dead, even if its parent has not read its status, or is reading it (X)."""
    return state_of(pid) in ("", "X", "Z")


def is_awaited(rank: int) -> bool:
    """Return whether a thread waits for the lifeline of a process of this rank to break."""
    return any(thread.name == f"ttp-lifeline-{rank}" for thread in threading.enumerate())


def state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def stop(pid: int) -> None:
    """Stop a process, and wait until all of its threads are stopped; its main thread may be the last."""
    os.kill(pid, signal.SIGSTOP)
    threads = [path.name for path in Path(f"/proc/{pid}/task").iterdir()]
    waiting.until(lambda: all(state_of(int(thread)) in ("", "T") for thread in threads), f"{pid} is stopped")


def open_descriptors(pid: int) -> dict[str, str]:
    """Return the target of each open descriptor, by number."""
    targets = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            targets[path.name] = str(path.readlink())
        except FileNotFoundError:  # the descriptor of the listing, or one that was closed meanwhile
            continue
    return targets


def controller_host_of(node: Node) -> ControllerHost:
    """Return the controller host of the node that runs the controller."""
    assert node.control.controller_host is not None
    return node.control.controller_host


class Worker:
    """A child process with the script, started as torch elastic starts workers; or a spare that becomes a
    worker.

    Args:
        added: additions to the environment of the process.
        program: the program that runs the script.
        start: `Warm`, or `subprocess.Popen` for a process without torch.
    """

    def __init__(
        self,
        rank: int,
        save: Path,
        index: int,
        count: int,
        added: Mapping[str, str] | None = None,
        program: Path = WORKER,
        start: type[subprocess.Popen[str]] = Warm,
    ) -> None:
        self.rank = rank
        self.process = start(
            command(program, save, index, count),
            env=environment(RANK=str(rank), **added or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=LONG_S)[1]
        return line.strip()

    def execute(self, *lines: str) -> None:
        """Let the script execute the lines, and wait for each."""
        for line in lines:
            self.send(line)
            assert self.read_line() == f"done {line}"

    def wait_at_the_door(self) -> None:
        self.send("door")
        assert self.read_line() == "waiting"

    def status(self) -> int:
        return self.process.wait(LONG_S)


def command(program: Path, save: Path, index: int, count: int) -> list[str]:
    """Return the command that starts `program` with the script and its arguments."""
    return [sys.executable, "-u", str(program), str(SCRIPT), str(save), str(index), str(count)]


def environment(**added: str) -> dict[str, str]:
    """Return the environment of a worker."""
    return {**os.environ, "MASTER_PORT": "0", "PYTHONPATH": str(ROOT), **added}


class Starter:
    """Starts replacement workers of a job, as `starter.Starter` does for torch's agent."""

    of_a_rank = ("RANK",)
    of_all_ranks: dict[str, str] = {}  # noqa: RUF012
    may_spare = True

    def __init__(self, job: Job) -> None:
        self._job = job

    def start(
        self, rank: int, added: Mapping[str, str], spare: Spare | None, *, or_cold: bool
    ) -> subprocess.Popen[bytes]:
        if self._job.cannot_start:
            raise OSError(11, "Resource temporarily unavailable")
        shards = self._job.shards
        worker = Worker(
            rank, self._job.save, rank % shards, shards, added, self._job.program, self._job.start
        )
        self._job.replaced_workers.append(self._job.workers[rank])
        self._job.workers[rank] = worker
        return worker.process  # type: ignore[return-value]  # text streams, which this file does not read

    def spare(self) -> Spare:
        return Spare(command(SPARE, self._job.save, 0, 1), environment())


class Job:
    """Nodes and workers of one job, with the last two arguments of the script for each rank.

    Attributes:
        cannot_start: whether starting a process fails.
        replaced_workers: workers whose ranks other processes have now.
    """

    def __init__(self, folder: Path, shards: int) -> None:
        self.save, self.logs = folder / "save", folder / "logs"
        self.save.mkdir()
        self.logs.mkdir()
        self.shards = shards
        self.program = WORKER
        self.start: type[subprocess.Popen[str]] = Warm
        self.cannot_start = False
        self.workers: dict[int, Worker] = {}
        self.replaced_workers: list[Worker] = []
        self.nodes: list[Node] = []

    def node(self, **settings: str) -> Node:
        node = Node(config.load({"TTP_LOG_PATH": str(self.logs), "TTP_ONLINE": "0", **settings}))
        self.nodes.append(node)
        return node

    def begin(self, world_size: int, nodes: Sequence[Node] = (), *, may_restart: bool = True) -> None:
        """Start a generation of workers, the same number on each node, and wait until all have started."""
        participants = list(nodes) or self.nodes or [self.node()]
        store = dist.HashStore()
        ranks_per_node = world_size // len(participants)
        for number, node in enumerate(participants):
            ranks = range(number * ranks_per_node, (number + 1) * ranks_per_node)
            node.begin(
                *(ranks, number, len(participants), world_size, store, "127.0.0.1"), may_restart=may_restart
            )
            started = {
                r: Worker(r, self.save, r % self.shards, self.shards, program=self.program, start=self.start)
                for r in ranks
            }
            self.workers.update(started)
            processes: Any = {rank: worker.process for rank, worker in started.items()}
            node.watch(processes, Starter(self))
        for node in participants:
            node.meet()
        for worker in self.workers.values():
            assert worker.read_line() == "here"
        # The worker's hello may come later; before it, agents send it nothing.
        connections = [node.control.workers._connections for node in participants]
        waiting.until(
            lambda: sum(map(len, connections)) == world_size, "the agents have heard of their workers"
        )

    def train(self, *lines: str) -> None:
        """Let all workers begin training and execute the lines."""
        for worker in self.workers.values():
            worker.execute("begin", *lines)
        controller_host = controller_host_of(self.nodes[0])
        waiting.until(
            lambda: len(controller_host.controller.membership.layouts) == len(self.workers),
            "the layouts are known",
        )

    def verdict(self, node: int = 0) -> Verdict:
        """Return the verdict, once every worker has ended."""
        assert self.nodes[node].control.settled.wait(LONG_S), "there is no verdict"
        verdict = self.nodes[node].control.verdict
        assert verdict is not None
        return verdict

    def statuses(self) -> dict[int, int]:
        return {rank: worker.status() for rank, worker in self.workers.items()}

    def saved(self) -> dict[str, str]:
        """Return the content of the files, by name, of the checkpoint that the tracker names."""
        step = tracker.tracked_step(self.save)
        if step is None:
            return {}
        assert tracker.is_complete(self.save, step)
        folder = self.save / f"iter_{step:07d}"
        return {path.name: path.read_text().strip() for path in folder.glob("*.txt")}

    def end(self) -> None:
        """End all workers, as torch's agent does before it restarts them."""
        for node in self.nodes:
            node.dismiss()
        for worker in (*self.replaced_workers, *self.workers.values()):
            worker.process.kill()
            worker.process.communicate(timeout=LONG_S)
        self.workers, self.replaced_workers = {}, []
        for node in self.nodes:
            node.end()

    def close(self) -> None:
        self.end()
        for node in self.nodes:
            node.close()


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job without nodes; its ranks hold a single shard, unless `shards` is a parameter."""
    for name in [name for name in os.environ if name.startswith("TTP_")]:
        monkeypatch.delenv(name)
    for name in ("TTP_AGENT", "TTP_BOARD", "TTP_BOARD_RANKS", "TTP_GENERATION"):
        monkeypatch.setenv(name, "")  # restored at the end
    new_job = Job(tmp_path, getattr(request, "param", 1))
    monkeypatch.setenv("TTP_LOG_PATH", str(new_job.logs))  # for workers
    # Workers that end by themselves, and agents that come to the next controller, may be slow.
    monkeypatch.setattr(worker_watch, "EXIT_GRACE_S", LONG_S)
    monkeypatch.setattr(failover, "RECONNECT_S", LONG_S)
    monkeypatch.setattr(agent_connections, "TRY_CONNECT_TIMEOUT_S", LONG_S)
    monkeypatch.setattr(agent_connections, "PROOF_S", LONG_S)
    yield new_job
    new_job.close()
